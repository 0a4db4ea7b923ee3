"""Preference pairs, judged answers, prompts and questions: what a row says, and what is wrong with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.data.examples import (
    AnswersExample,
    ChatExample,
    PromptExample,
    Reading,
    TextExample,
    count_common_characters,
)
from runner.data.formats import FormatCheck
from runner.data.readers import Problems, Row, SourceLocation
from tests.data.conftest import chat

HERE = SourceLocation("a.jsonl", 1)
TALK, OTHER = chat("2+2?", "4"), chat("2+2?", "5")
LONG, LONGER = chat("a", "b", "c", "d"), chat("a", "b", "c", "e")
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def check(reading: Reading, *rows: dict[str, Any]) -> tuple[list[Any], FormatCheck, str]:
    """Examples, the check, and the error's text or nothing."""
    problems = Problems("data.path", "a.jsonl")
    found = FormatCheck(problems, reading)
    examples = list(found.examples(Row(SourceLocation("a.jsonl", i), row) for i, row in enumerate(rows, 1)))
    return examples, found, str(problems.error()) if problems.count else ""


def chats(context: int, *talks: list[dict[str, str]], tools: Any = ()) -> tuple[ChatExample, ...]:
    return tuple(ChatExample(HERE, tuple(talk), context, tuple(tools)) for talk in talks)


PLAIN_PAIR = (TextExample(HERE, "The sky is", " blue."), TextExample(HERE, "The sky is", " green."))
SOUND: list[tuple[Reading, dict[str, Any], str, Any]] = [
    (
        "pairs",
        {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."},
        "prompt+chosen+rejected (text)",
        AnswersExample(HERE, PLAIN_PAIR, {"margin": None}),
    ),
    (
        "pairs",
        {"chosen": "The sky is blue.", "rejected": "The sky is green.", "margin": 2},
        "chosen+rejected (text)",
        AnswersExample(HERE, PLAIN_PAIR, {"margin": 2.0}),
    ),
    (
        "pairs",
        {"prompt": TALK[:1], "chosen": TALK[1:], "rejected": OTHER[1:], "margin": -0.5},
        "prompt+chosen+rejected (messages)",
        AnswersExample(HERE, chats(1, TALK, OTHER), {"margin": -0.5}),
    ),
    (
        "pairs",
        {"chosen": TALK, "rejected": OTHER, "tools": TOOLS, "margin": None},
        "chosen+rejected (messages)",
        AnswersExample(HERE, chats(1, TALK, OTHER, tools=TOOLS), {"margin": None}),
    ),
    (
        "pairs",  # as UltraFeedback has it: the prompt's words again, beside whole conversations
        {"prompt": "2+2?", "chosen": TALK, "rejected": OTHER},
        "chosen+rejected (messages)",
        AnswersExample(HERE, chats(1, TALK, OTHER), {"margin": None}),
    ),
    (
        "judged",
        {"prompt": "a", "completion": "b", "label": False},
        "prompt+completion+label (text)",
        AnswersExample(HERE, (TextExample(HERE, "a", "b"),), {"good": False}),
    ),
    (
        "judged",
        {"prompt": TALK[:1], "completion": TALK[1:], "label": True, "tools": TOOLS},
        "prompt+completion+label (messages)",
        AnswersExample(HERE, chats(1, TALK, tools=TOOLS), {"good": True}),
    ),
    ("prompts", {"prompt": "a"}, "prompt (text)", PromptExample(HERE, "a")),
    (
        "prompts",
        {"prompt": TALK[:1], "tools": TOOLS, "answer": "4"},
        "prompt (messages)",
        PromptExample(HERE, tuple(TALK[:1]), tuple(TOOLS), {"tools": TOOLS, "answer": "4"}),
    ),
    (
        "prompts",
        {"prompt": TALK[:1], "completion": TALK[1:]},
        "prompt (messages)",
        PromptExample(HERE, tuple(TALK[:1]), (), {"completion": "4"}),
    ),
    ("prompts", {"prompt": "a", "completion": "b"}, "prompt (text)", PromptExample(HERE, "a", (), {"completion": "b"})),
    (
        "questions",
        {"prompt": "a", "answer": 4, "hint": "b"},
        "prompt+answer (text)",
        AnswersExample(HERE, (TextExample(HERE, "a", "4"),), {"messages": None, "columns": {"answer": 4, "hint": "b"}}),
    ),
    (
        "questions",
        {"prompt": TALK[:1], "answer": "4"},
        "prompt+answer (messages)",
        AnswersExample(
            HERE,
            tuple(replace(chat, is_question=True) for chat in chats(1, TALK)),
            {"messages": TALK[:1], "columns": {"answer": "4"}},
        ),
    ),
]


@pytest.mark.parametrize(("reading", "row", "form", "example"), SOUND)
def test_each_format_is_detected(reading: Reading, row: dict[str, Any], form: str, example: Any) -> None:
    examples, found, message = check(reading, row)
    assert (message, str(found.format), examples) == ("", form, [example])


UNKNOWN: list[tuple[Reading, dict[str, Any], str]] = [
    ("pairs", {"messages": TALK}, "trains on preference pairs: expected the columns `prompt`, `chosen`"),
    ("pairs", {"messages": TALK}, "found messages; these are completions for algorithm=sft"),
    ("pairs", {"prompt": "a", "completion": "b", "label": True}, "these are labeled completions (algorithm=kto)"),
    ("pairs", {"prompt": "a"}, "`prompt` alone has no completion to train on"),
    ("judged", {"prompt": "a", "completion": "b"}, "expected the columns `prompt`, `completion` and `label`"),
    ("judged", {"prompt": "a", "chosen": "b", "rejected": "c"}, "are preference pairs (algorithm=dpo, rm)"),
    ("sft", {"chosen": "a b", "rejected": "a c"}, "are preference pairs (algorithm=dpo, rm)"),
    ("sft", {"problem": "a", "response": "b"}, "type 'data.rename_columns={problem: prompt, response: completion}'"),
    ("sft", {"question": "a", "completion": "b"}, "type 'data.rename_columns={question: prompt}'"),
    ("prompts", {"question": "a", "answer": "b"}, "expected a column `prompt` (others are for rewards)"),
    (
        "prompts",
        {"question": "a", "answer": "b"},
        "found question, answer; type 'data.rename_columns={question: prompt}'",
    ),
    ("questions", {"question": "a", "answer": "b"}, "type 'data.rename_columns={question: prompt}'"),
    (
        "questions",
        {"prompt": "a"},
        "completions of held-out prompts are compared: expected the columns `prompt` and `answer`",
    ),
]


@pytest.mark.parametrize(("reading", "row", "expected"), UNKNOWN)
def test_data_for_another_algorithm_names_what_this_one_needs(
    reading: Reading, row: dict[str, Any], expected: str
) -> None:
    examples, _, message = check(reading, row)
    assert examples == []
    assert expected in message
    assert "a.jsonl:1: " in message


PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
TALKS = {"prompt": TALK[:1], "chosen": TALK[1:], "rejected": OTHER[1:]}
FAULTY: list[tuple[Reading, dict[str, Any], str]] = [
    ("pairs", {**PAIR, "rejected": 3}, "column rejected: expected text, found a number"),
    ("pairs", {**PAIR, "chosen": " "}, "column chosen is empty"),
    ("pairs", {**PAIR, "prompt": ""}, "column prompt is empty"),
    ("pairs", {**PAIR, "margin": "2"}, "column margin: expected a finite number, found text"),
    ("pairs", {**PAIR, "margin": True}, "column margin: expected a finite number, found true or false"),
    ("pairs", {**PAIR, "margin": 10**400}, "column margin: expected a finite number, found 1000"),
    ("pairs", {**TALKS, "prompt": []}, "column prompt is empty"),
    ("pairs", {**TALKS, "chosen": "4"}, "column chosen: expected a list of messages, found text"),
    ("pairs", {**TALKS, "chosen": []}, "the chosen has no assistant turn"),
    ("pairs", {**TALKS, "chosen": TALK}, "column chosen begins with a turn of role user; expected the assistant's"),
    ("pairs", {**TALKS, "rejected": chat("a", "b", "c")[1:]}, "column rejected ends with a turn of role user"),
    ("pairs", {**TALKS, "rejected": [{"role": "asistant", "content": "b"}]}, "rejected[0].role: unknown role"),
    ("pairs", {"chosen": TALK, "rejected": chat("3+3?", "6")}, "have no common start, so there is no prompt"),
    ("pairs", {"chosen": "blue", "rejected": "green"}, "have no common start, so there is no prompt"),
    ("pairs", {"chosen": TALK, "rejected": OTHER[:1]}, "column rejected has no assistant turn"),
    ("pairs", {"chosen": TALK, "rejected": [{"role": "user"}]}, "rejected[0]: no content"),
    ("judged", {"prompt": "a", "completion": "b", "label": 1}, "column label: expected true or false, found a number"),
    ("judged", {"prompt": "a", "completion": "b", "label": "true"}, "a CSV file has text only, use JSONL or Parquet"),
    ("prompts", {"prompt": ""}, "column prompt is empty"),
    ("prompts", {"prompt": []}, "column prompt is empty"),
    ("prompts", {"prompt": 3}, "column prompt: expected text, found a number"),
    ("prompts", {"prompt": TALK}, "prompt[1]: the prompt ends with an assistant turn; expected the messages before"),
    ("prompts", {"prompt": [{"role": "user"}]}, "prompt[0]: no content"),
    ("prompts", {"prompt": TALK[:1], "tools": "{"}, "column tools: text that is not JSON"),
    ("prompts", {"prompt": TALK[:1], "tools": "[" * 100_000}, "column tools: text that is not JSON (nested too"),
    ("questions", {"prompt": "a", "answer": [1]}, "column answer: expected text or a number, found a list"),
    ("questions", {"prompt": TALK[:1], "answer": " "}, "column answer is empty"),
    ("questions", {"prompt": TALK, "answer": "a"}, "the prompt ends with an assistant turn"),
]


@pytest.mark.parametrize(("reading", "row", "expected"), FAULTY)
def test_what_is_wrong_with_a_row_is_said(reading: Reading, row: dict[str, Any], expected: str) -> None:
    examples, _, message = check(reading, row)
    assert examples == []
    assert f"a.jsonl:1: {expected}" in message or (expected in message and "a.jsonl:1: " in message)


def test_a_later_row_of_another_format_is_an_error() -> None:
    assert (
        "a.jsonl:2: no column prompt; expected prompt+chosen"
        in check("pairs", PAIR, {"chosen": "a", "rejected": "b"})[2]
    )
    judged = {"prompt": "a", "completion": "b"}
    assert "a.jsonl:2: no column label" in check("judged", {**judged, "label": True}, judged)[2]


def test_columns_of_a_prompt_are_for_rewards_and_of_others_ignored() -> None:
    found = check("prompts", {"prompt": "a", "answer": "b", "day": float("nan")}, {"prompt": "c", "tools": 3})[1]
    assert (found.reward_columns, found.ignored) == ({"answer", "tools"}, {"day"})
    assert check("prompts", {"prompt": "a", "day": b"x"})[0] == [PromptExample(HERE, "a")]
    assert check("pairs", {**PAIR, "margin": 1, "tools": TOOLS, "id": 3})[1].ignored == {"tools", "id"}
    assert check("judged", {"prompt": "a", "completion": "b", "label": True, "margin": 3})[1].ignored == {"margin"}


def test_the_implicit_prompt_is_what_comes_before_the_answers_that_differ() -> None:
    [found], _, message = check("pairs", {"chosen": LONG, "rejected": LONGER})
    assert message == ""
    assert found.answers == chats(3, LONG, LONGER)
    # From a user's turn on: the answer before it is the last thing that the assistant says on both sides.
    other = [*LONG[:2], *chat("x", "y")]
    [found], check_, _ = check("pairs", {"chosen": LONG, "rejected": other})
    assert found.answers == chats(1, LONG, other)
    assert check_.num_several_turns == 1
    [found], _, _ = check("pairs", {"chosen": LONG, "rejected": LONG[:2]})  # one continues where the other ends
    assert found.answers == chats(1, LONG, LONG[:2])


def test_pairs_that_do_not_differ_are_left_out_and_counted() -> None:
    same: list[dict[str, Any]] = [{"chosen": TALK, "rejected": TALK}, {"chosen": TALK, "rejected": OTHER}]
    examples, found, message = check("pairs", *same)
    assert (len(examples), found.num_identical_pairs, message) == (1, 1, "")
    assert check("pairs", {**PAIR, "rejected": "b"})[1].num_identical_pairs == 1
    assert check("pairs", {"chosen": "a b c", "rejected": "a b c"})[1].num_identical_pairs == 1


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("The sky is blue.", "The sky is black.", "The sky is"),
        ("Q: 1+1\nA: 2", "Q: 1+1\nA: 3", "Q: 1+1\nA:"),
        ("Q\n\nyes", "Q\n\nno", "Q\n\n"),
        ("a b c", "a b", "a"),
        ("say foo, bar", "say foo bar", "say foo"),
        ("x = 12", "x = 13", "x ="),
        ("天空是蓝色的", "天空是绿色的", "天空是"),
    ],
)
def test_the_implicit_prompt_of_a_text_ends_with_a_word(chosen: str, rejected: str, prompt: str) -> None:
    assert chosen[: count_common_characters(chosen, rejected)] == prompt
    assert rejected[: count_common_characters(rejected, chosen)] == prompt


WORDS = st.text(st.sampled_from("ab .\n"), min_size=1, max_size=12).filter(str.strip)


@given(WORDS, WORDS)
def test_both_answers_are_whole_and_have_text(chosen: str, rejected: str) -> None:
    cut = count_common_characters(chosen, rejected)
    assert cut == count_common_characters(rejected, chosen)
    assert chosen[:cut] == rejected[:cut]
    assert chosen[cut:].strip() and rejected[cut:].strip()
