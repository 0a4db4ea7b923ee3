"""reward=ifeval: 1 where an answer follows all instructions of a row, which a program can check.

Zhou et al. 2023, "Instruction-Following Evaluation for Large Language Models" (arXiv 2311.07911), prompt-level strict.

Each check is that of the authors' program (google-research/instruction_following_eval). Departures: sentences and words
in capitals are found by punctuation and white space, where it asks nltk; keywords and marks are plain text, where it
takes them for regular expressions; langdetect has the seed 0: without one it draws. An argument that is missing makes
an answer unscorable, where it draws one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from runner.core.untrusted_text import parse_json, shorten
from runner.interfaces.rewards import GroupScorer, ScoringFailures, UnscorableError, require_column, score_each
from runner.reward.config import IfevalConfig

if TYPE_CHECKING:
    from runner.interfaces import Completion

Arguments = Mapping[str, Any]
Check = Callable[[str, Arguments], bool]
ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


def build(config: IfevalConfig, **_: Any) -> GroupScorer:
    """The reward; an instruction that is unknown here makes an answer unscorable."""

    def rate(completion: Completion) -> float:
        names, arguments = (
            require_column(completion, column, "ifeval") for column in ("instruction_id_list", "kwargs")
        )
        if not isinstance(names, list) or not isinstance(arguments, list) or len(names) != len(arguments):
            text = "instruction_id_list and kwargs have to be lists of equal length"
            raise UnscorableError(
                "no lists of instructions", f"{text}, not {shorten(str(names), 80)} and {shorten(str(arguments), 80)}"
            )
        return float(all([follows(n, completion.text, a or {}) for n, a in zip(names, arguments, strict=True)]))

    advice = "score rows of google/IFEval or of its shape"
    return GroupScorer(score_each(rate), ScoringFailures("reward=ifeval", config.max_failures, advice))


def follows(instruction: str, text: str, arguments: Arguments) -> bool:
    """Whether an answer follows an instruction.

    Raises UnscorableError for one that is unknown or lacks an argument.
    """
    if (check := CHECKS.get(instruction)) is None:
        raise UnscorableError("unknown instruction", f"{instruction} is none of the 25 instructions of IFEval")
    try:
        return check(text, arguments) and bool(text.strip())
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        given = f"{instruction} cannot be checked with the arguments {shorten(str(arguments), 200)}"
        raise UnscorableError("unusable arguments", f"{given}: {type(error).__name__}: {error}") from error


def _relates(count: int, relation: str, wanted: int) -> bool:
    if relation not in ("at least", "less than"):
        raise ValueError(f"the relation {relation!r} is neither 'at least' nor 'less than'")
    return count >= wanted if relation == "at least" else count < wanted


def _count(text: str, word: str) -> int:
    return len(re.findall(re.escape(word.strip()), text, re.IGNORECASE))


def _capital_words(text: str) -> int:
    """Tokens in capitals; hyphens, slashes and inner points join, `'S` and `N'T` are tokens of their own."""
    parted = re.sub(r"(?i)(n['’]t|['’](?:s|m|d|ll|re|ve))\b", r" \1", text)
    return sum(token.isupper() for token in re.findall(r"(?:[^\s,;:@#$%&*?!\"“”()\[\]{}<>…-]|(?<!-)-(?!-))+", parted))


def _sentences(text: str) -> int:
    return len([one for one in re.split(r"(?<=[.!?])\s+", text.strip()) if re.search(r"\w", one)])


def _first_word(text: str, arguments: Arguments) -> bool:
    """The nth paragraph begins with the word, and so many paragraphs are not empty."""
    paragraphs = [part.strip() for part in text.split("\n\n")]
    nth, filled = int(arguments["nth_paragraph"]), sum(map(bool, paragraphs))
    if filled != int(arguments["num_paragraphs"]) or not 0 < nth <= filled or not paragraphs[nth - 1]:
        return False
    first = re.split(r"[.,?!'\"]", paragraphs[nth - 1].split()[0].lstrip("'").lstrip('"'))[0]
    return first.lower() == str(arguments["first_word"]).lower()


def _paragraphs(text: str, arguments: Arguments) -> bool:
    """Paragraphs are parted by ***; the first and the last may be empty."""
    parts = re.split(r"\s?\*\*\*\s?", text)
    inner = parts[1 if not parts[0].strip() else 0 : len(parts) - (not parts[-1].strip())]
    return len(inner) == int(arguments["num_paragraphs"]) and all(part.strip() for part in inner)


def _highlights(text: str, arguments: Arguments) -> bool:
    """*One* and **two** asterisks are counted apart: ***both*** counts twice."""
    found = [*re.findall(r"\*[^\n*]*\*", text), *re.findall(r"\*\*[^\n*]*\*\*", text)]
    return sum(bool(one.strip("*").strip()) for one in found) >= int(arguments["num_highlights"])


def _bullets(text: str) -> int:
    return sum(len(re.findall(rf"^\s*{mark}.*$", text, re.MULTILINE)) for mark in (r"\*[^*]", "-"))


def _sections(text: str, arguments: Arguments) -> bool:
    marks = re.findall(rf"\s?{re.escape(str(arguments['section_spliter']).strip())}\s?\d+\s?", text)
    return len(marks) >= int(arguments["num_sections"])


def _postscript(text: str, arguments: Arguments) -> bool:
    marker = str(arguments["postscript_marker"]).strip()
    spelled = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}.get(marker, re.escape(marker))
    return re.search(spelled, text, re.IGNORECASE) is not None


def _is_json(text: str, arguments: Arguments) -> bool:
    inner = re.sub(r"^```(?:json|Json|JSON)?|```$", "", text.strip()).strip()
    try:
        parse_json(inner)
    except ValueError:
        return False
    return True


def _two_responses(text: str, arguments: Arguments) -> bool:
    parts = [part.strip() for part in text.split("******")]
    inner = [part for at, part in enumerate(parts) if part or 0 < at < len(parts) - 1]
    return len(inner) == 2 and inner[0] != inner[1] and all(inner)


def _is_language(text: str, language: str) -> bool:
    import langdetect  # type: ignore[import-not-found,import-untyped,unused-ignore]

    langdetect.DetectorFactory.seed = 0
    try:
        return bool(langdetect.detect(text) == language)
    except langdetect.LangDetectException:  # a text without a letter
        return True


CHECKS: dict[str, Check] = {
    "keywords:existence": lambda t, a: all(_count(t, word) for word in a["keywords"]),
    "keywords:frequency": lambda t, a: _relates(_count(t, a["keyword"]), a["relation"], int(a["frequency"])),
    "keywords:forbidden_words": lambda t, a: (
        not any(re.search(rf"\b{re.escape(word)}\b", t, re.IGNORECASE) for word in a["forbidden_words"])
    ),
    "keywords:letter_frequency": lambda t, a: _relates(
        t.lower().count(str(a["letter"]).lower()), a["let_relation"], int(a["let_frequency"])
    ),
    "language:response_language": lambda t, a: _is_language(t, a["language"]),
    "length_constraints:number_sentences": lambda t, a: _relates(_sentences(t), a["relation"], int(a["num_sentences"])),
    "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:number_words": lambda t, a: _relates(
        len(re.findall(r"\w+", t)), a["relation"], int(a["num_words"])
    ),
    "length_constraints:nth_paragraph_first_word": _first_word,
    "detectable_content:number_placeholders": lambda t, a: len(re.findall(r"\[.*?\]", t)) >= int(a["num_placeholders"]),
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": lambda t, a: _bullets(t) == int(a["num_bullets"]),
    "detectable_format:constrained_response": lambda t, a: any(answer in t for answer in ANSWERS),
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": _is_json,
    "detectable_format:title": lambda t, a: any(one.strip("<>").strip() for one in re.findall(r"<<[^\n]+>>", t)),
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": lambda t, a: t.strip().lower().startswith(str(a["prompt_to_repeat"]).strip().lower()),
    "startend:end_checker": lambda t, a: t.strip().strip('"').lower().endswith(str(a["end_phrase"]).strip().lower()),
    "change_case:capital_word_frequency": lambda t, a: _relates(
        _capital_words(t), a["capital_relation"], int(a["capital_frequency"])
    ),
    "change_case:english_capital": lambda t, a: t.isupper() and _is_language(t, "en"),
    "change_case:english_lowercase": lambda t, a: t.islower() and _is_language(t, "en"),
    "punctuation:no_comma": lambda t, a: "," not in t,
    "startend:quotation": lambda t, a: len(t.strip()) > 1 and t.strip()[0] == t.strip()[-1] == '"',
}
