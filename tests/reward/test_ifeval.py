"""reward=ifeval: each instruction with an answer that follows it and one that does not."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from runner.core.auto_choices import Decisions
from runner.core.errors import EnvironmentProblem
from runner.interfaces import Completion, Prompt
from runner.interfaces.rewards import UnscorableError
from runner.reward.config import IfevalConfig
from runner.reward.ifeval import CHECKS, build, follows

AT_LEAST, FEWER = "at least", "less than"
CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("keywords:existence", {"keywords": ["tea", "milk"]}, "Tea with MILK", "tea"),
    ("keywords:frequency", {"keyword": "tea", "relation": AT_LEAST, "frequency": 2}, "tea Tea", "tea"),
    ("keywords:frequency", {"keyword": "tea", "relation": FEWER, "frequency": 2}, "tea", "tea tea"),
    ("keywords:forbidden_words", {"forbidden_words": ["tea"]}, "a team", "Tea!"),
    ("keywords:letter_frequency", {"letter": "a", "let_relation": AT_LEAST, "let_frequency": 2}, "Ana", "an"),
    ("length_constraints:number_sentences", {"relation": FEWER, "num_sentences": 3}, "A. B!", "A. B. C?"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "one\n***\ntwo", "one\n\ntwo"),
    ("length_constraints:number_words", {"relation": AT_LEAST, "num_words": 3}, "a b c", "a b"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "so"},
        "a\n\nSo, b",
        "So\n\na",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name] [city]", "[name]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye.\nP.S. tea", "Bye."),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a\n* b\n* c"),
    ("detectable_format:constrained_response", {}, "My answer is yes.", "yes"),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and **b**", "*a*"),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        "SECTION 1\na\nSECTION 2\nb",
        "SECTION 1 a",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{a}"),
    ("detectable_format:title", {}, "<<tea>>\nx", "tea"),
    ("detectable_format:title", {}, "<<a>> b", "<<<>>>"),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "***both***", "**two**"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "*\n- a", "* a"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "it"},
        "a\n\nIt's b",
        "\n\na\n\nit b",  # paragraph 2 is a: an empty one before it is not counted, but has a number
    ),
    (
        "change_case:capital_word_frequency",
        {"capital_relation": FEWER, "capital_frequency": 2},
        "A-B/C",
        "IT'S",
    ),
    ("combination:two_responses", {}, "a\n******\nb", "a\n******\na"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say hi"}, "say hi\nHi", "Hi"),
    ("startend:end_checker", {"end_phrase": "Any questions?"}, "Tea. Any questions?", "Any questions? No"),
    ("change_case:capital_word_frequency", {"capital_relation": AT_LEAST, "capital_frequency": 2}, "A BC d", "A bc"),
    ("change_case:english_capital", {}, "THE TEA IS VERY GOOD TODAY!", "The tea is very good today!"),
    (
        "change_case:english_capital",
        {},
        "THE TEA IS VERY GOOD TODAY!",
        "ΤΟ ΤΣΑΙ ΕΙΝΑΙ ΠΟΛΥ ΚΑΛΟ!",
    ),
    ("change_case:english_lowercase", {}, "the tea is very good today!", "The tea is very good today!"),
    ("change_case:english_lowercase", {}, "the tea is very good today!", "der tee ist heute sehr gut!"),
    ("punctuation:no_comma", {}, "tea", "tea, milk"),
    ("startend:quotation", {}, '"tea"', "tea"),
]


@pytest.mark.parametrize(("instruction", "arguments", "right", "wrong"), CASES, ids=lambda v: str(v)[:40])
def test_an_instruction(instruction: str, arguments: dict[str, Any], right: str, wrong: str) -> None:
    if instruction.startswith("change_case:english"):
        pytest.importorskip("langdetect")
    assert follows(instruction, right, arguments) and not follows(instruction, wrong, arguments)
    assert not follows(instruction, " ", arguments), "an empty answer follows nothing"


def test_without_langdetect_the_job_ends_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentProblem, match=r'needs langdetect\n  pip install "posttrain-run\[ifeval\]"'):
        IfevalConfig().preflight()


def test_the_language_of_an_answer() -> None:
    pytest.importorskip("langdetect")
    IfevalConfig().preflight()
    asked = {"language": "de"}
    assert follows("language:response_language", "Der Tee ist heute sehr gut, danke schön.", asked)
    assert not follows("language:response_language", "The tea is very good today, thank you.", asked)
    assert follows("language:response_language", "1 + 1", asked), "a text without a letter has no language"


def test_every_instruction_has_a_case() -> None:
    assert {case[0] for case in CASES} | {"language:response_language"} == CHECKS.keys() and len(CHECKS) == 25


def test_all_of_a_rows_instructions_count_and_an_unknown_one_is_not_scored() -> None:
    reward = build(IfevalConfig(), decide=Decisions(), folder=Path("."))
    columns = {"instruction_id_list": ["punctuation:no_comma", "startend:quotation"], "kwargs": [None, {}]}
    prompt = Prompt((1,), "p", None, columns)
    group = [Completion(prompt, (1,), text, "stop") for text in ('"a b"', '"a, b"', "a b")]
    assert reward.score([group]) == [[1, 0, 0]]
    with pytest.raises(UnscorableError, match="none of the 25"):
        follows("keywords:rhyme", "a", {})


def test_a_row_of_another_shape_is_not_scored(caplog: pytest.LogCaptureFixture) -> None:
    """Text where lists belong, lists of different lengths, arguments that are missing."""
    reward = build(IfevalConfig(), decide=Decisions(), folder=Path("."))
    names = ["keywords:existence"]
    for columns in (
        {"instruction_id_list": "keywords:existence", "kwargs": "{}"},
        {"instruction_id_list": names, "kwargs": []},
        {"instruction_id_list": names, "kwargs": [{"keywords": None}]},
        {
            "instruction_id_list": ["keywords:frequency"],
            "kwargs": [{"keyword": "a", "relation": "more", "frequency": 1}],
        },
    ):
        prompt = Prompt((1,), "p", None, columns)
        assert reward.score([[Completion(prompt, (1,), "a", "stop")]]) == [[None]]
    assert "have to be lists of equal length" in caplog.text and "cannot be checked with the arguments" in caplog.text
