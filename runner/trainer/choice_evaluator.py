"""Multiple choice by log-likelihood: of the options of a question, the likeliest one is the answer.

    question, options ──▶ rows: prompt + option ──score──▶ log p(option | prompt) ──▶ accuracy, accuracy_norm

As in lm-eval (`hf`, request type loglikelihood): prompt and option are tokenized together, and white space at the end
of the prompt, such as the newline of a chat template, counts to the option.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from runner.core.columns import column_value
from runner.core.errors import DataError
from runner.core.media import without_media
from runner.core.untrusted_text import shorten
from runner.interfaces import EvalQuestion, TokenizedExample
from runner.trainer.evaluation_metrics import with_interval
from runner.trainer.evaluator import Report, ScoreItems, weighted_logprobs


@dataclass(frozen=True, slots=True)
class ChoiceEvaluator:
    """Measures which of a question's options, in the column `choices`, a model holds for the likeliest.

    prefix: of the metrics, e.g. eval/mmlu; key: of the option `choices`, for messages; batch_size: most rows at once
    """

    questions: Sequence[EvalQuestion]
    choices: str
    prefix: str
    key: str
    tokenizer: Any
    score: ScoreItems
    batch_size: int

    def evaluate(self, step: int = 0) -> Report:
        """accuracy, by log p(option); accuracy_norm, by log p(option) / characters of the option; intervals.

        Raises DataError for a question without options, or whose answer is none of them.
        """
        start = time.perf_counter()
        options = [_options(question, self.choices, self.key) for question in self.questions]
        rights = [
            _right_option(question, found, self.key) for question, found in zip(self.questions, options, strict=True)
        ]
        rows = [
            option_row(self.tokenizer, question.prompt_ids, option)
            for question, found in zip(self.questions, options, strict=True)
            for option in found
        ]
        sums = iter(weighted_logprobs(rows, self.score, self.batch_size))
        logprobs = [[next(sums) for _ in found] for found in options]
        chosen = [_likeliest(values, [1] * len(values)) for values in logprobs]
        by_length = [_likeliest(v, [len(one) for one in found]) for v, found in zip(logprobs, options, strict=True)]
        values = {
            **_accuracy(f"{self.prefix}/accuracy", chosen, rights),
            **_accuracy(f"{self.prefix}/accuracy_norm", by_length, rights),
            "time/eval_s": time.perf_counter() - start,
        }
        columns = zip(self.questions, options, rights, chosen, logprobs, strict=True)
        return Report(values, [self._record(*one) for one in columns])

    def _record(
        self, question: EvalQuestion, options: Sequence[str], right: int, chosen: int, logprobs: Sequence[float]
    ) -> dict[str, Any]:
        return {
            "set": self.prefix.partition("/")[2],
            "prompt": question.prompt,
            "answer": options[chosen],
            "expected": options[right],
            "exact": chosen == right,
            "logprobs": list(logprobs),
        }


def option_row(tokenizer: Any, prompt_ids: Sequence[int], option: str) -> TokenizedExample:
    """The ids of prompt and option together; the option's, at the end, have weight 1.

    Raises DataError where the tokenizer merges all of the option with the prompt, so that no id is the option's.
    """
    text = str(
        tokenizer.decode(without_media(prompt_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    )
    start = text.rstrip()
    ids, before = (list(tokenizer(one, add_special_tokens=False)["input_ids"]) for one in (text + option, start))
    if len(ids) <= len(before):
        text = f"the option {option!r} adds no token to the prompt {shorten(start, 60, end=True)!r}"
        raise DataError(f"{text}; begin options with a space")
    return TokenizedExample(tuple(ids), (0.0,) * len(before) + (1.0,) * (len(ids) - len(before)))


def _likeliest(logprobs: Sequence[float], lengths: Sequence[int]) -> int:
    """The index of the largest log-probability for its length, the first of equals."""
    scores = [value / length for value, length in zip(logprobs, lengths, strict=True)]
    return scores.index(max(scores))


def _accuracy(name: str, chosen: Sequence[int], rights: Sequence[int]) -> dict[str, float]:
    return with_interval(name, [float(a == b) for a, b in zip(chosen, rights, strict=True)], share=True)


def _options(question: EvalQuestion, column: str, key: str) -> list[str]:
    found = column_value(question.columns, column)
    if not isinstance(found, list) or len(found) < 2 or not all(isinstance(one, str) and one for one in found):
        text = f"the question {shorten(question.prompt, 60)!r} has no list of two or more texts in its column {column}"
        raise DataError(f"{key}={column}: {text}; columns: {', '.join(question.columns) or 'none'}")
    return found


def _right_option(question: EvalQuestion, options: Sequence[str], key: str) -> int:
    """The index of the right option: the answer is its text, its number from 0, or its letter."""
    answer = question.columns.get("answer", question.answer)
    if isinstance(answer, str):
        letter = ord(answer) - ord("A") if len(answer) == 1 else -1
        answer = options.index(answer) if answer in options else letter
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(options):
        return answer
    text = f"the answer of {shorten(question.prompt, 60)!r} is {question.answer!r}"
    raise DataError(
        f"{key}: {text}; the text, the number from 0 or the letter of one of {len(options)} options is expected"
    )
