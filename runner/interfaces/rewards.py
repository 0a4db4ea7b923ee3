"""What rewards share: a base that scores one group at a time, in threads, and counts failures.

    groups ──▶ score_group(group), `workers` at a time ──▶ GroupScores ──▶ ScoringFailures ──▶ scores in order

`ScoringFailures` logs each kind of failure once, counts all of them, and raises when nothing is scored any more.

The factory of every reward is called with the keywords device, tokenizer, seed, steps, decide, folder and fit, and
names those that it needs. `fit` puts the device's own operators and attention into a transformers model.

A reward function or service gets a group in TRL's arguments, as plain JSON values (`reward_arguments`):

prompts, completions: texts, or lists of messages where the data has messages
completion_ids: token ids      every column of the data: one value per answer
environment_scores, environments: of episodes, where an environment says them
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any

from runner.core.columns import column_value, json_type_name, nested_names
from runner.core.errors import DataError, EnvironmentProblem, RunnerError
from runner.core.untrusted_text import shorten

if TYPE_CHECKING:
    from runner.interfaces.sampling import Completion

log = logging.getLogger("runner")
CHOSEN = "the reward returned None for every sample"
RESERVED_ARGUMENTS = ("prompts", "completions", "completion_ids")  # what a function or service gets beside the columns
TRL_ARGUMENTS = ("trainer_state", "log_extra", "log_metric")  # what a function gets too
# and of an environment: each episode's score, and the object's attributes, in TRL the object itself
ENVIRONMENT_ARGUMENTS = ("environment_scores", "environments")
MOST_KINDS = 20  # of failures, which are printed one by one; further kinds are only counted


class UnscorableError(Exception):
    """A sample cannot be scored. `kind` is the sort of reason, `message` the reason in words."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class ScoringFailure:
    """Why `samples` samples of a group have no score."""

    kind: str
    message: str
    samples: int = 1


@dataclass(frozen=True, slots=True)
class GroupScores:
    """One group's scores, None where there is none, and why; raised: by a function."""

    values: list[float | None]
    failures: tuple[ScoringFailure, ...] = ()
    raised: bool = False


def unscored_group(size: int, kind: str, message: str) -> GroupScores:
    """A group of which no sample has a score, for one reason."""
    return GroupScores([None] * size, (ScoringFailure(kind, message, size),))


class FailureCounts:
    """Counts failures by kind; logs the first one of each kind, and at the end how many there were."""

    def __init__(self, label: str) -> None:
        self._label, self._counts = label, Counter[str]()

    def add(self, kind: str, text: str, count: int = 1) -> None:
        """Count failures of a kind; `text` is logged for the first one."""
        kind = kind if kind in self._counts or len(self._counts) < MOST_KINDS else "other reasons"
        if kind not in self._counts:
            log.warning("%s: %s", self._label, text)
        self._counts[kind] += count

    def log_total(self, of: int, what: str) -> None:
        """Log once how many of so many failed, by kind. what: of whom, and what happened."""
        if self._counts:
            kinds = "; ".join(f"{count} × {kind}" for kind, count in self._counts.most_common())
            log.warning("%s: %d of %d %s: %s", self._label, self._counts.total(), of, what, kinds)
        self._counts.clear()


class ScoringFailures:
    """Counts the failures of a reward."""

    def __init__(self, label: str, max_failures: int, remedy: str, error: type[RunnerError] = DataError) -> None:
        self._label, self._remedy, self._error = label, remedy, error
        self._max_failures, self._counts = max_failures, FailureCounts(label)
        self._in_a_row = 0  # groups of which no sample could be scored
        self._samples = 0

    def record_group(self, scored: GroupScores) -> list[float | None]:
        """Count a group and return its scores. Raises `error` after `max_failures` groups in a row without a
        score, whatever the cause: DataError where the reward itself returned None for each sample."""
        for failure in scored.failures:
            self._counts.add(failure.kind, f"not scored: {failure.message}", failure.samples)
        self._samples += len(scored.values)
        if not scored.values:
            return scored.values
        self._in_a_row = self._in_a_row + 1 if all(value is None for value in scored.values) else 0
        if self._in_a_row >= self._max_failures:
            error, reason = (self._error, scored.failures[-1].message) if scored.failures else (DataError, CHOSEN)
            raise error(
                f"{self._label}: no sample of {self._in_a_row} groups in a row could be scored; the last reason:\n"
                f"  {reason}\n  {self._remedy}"
            )
        return scored.values

    def close(self) -> None:
        """Warn how many samples had no score, by kind."""
        self._counts.log_total(self._samples, "samples could not be scored")


Group = Sequence["Completion"]


class GroupScorer:
    """A reward made of a function of one group; with several workers, that many threads call it at a time."""

    def __init__(
        self,
        score_group: Callable[[Group], GroupScores],
        failures: ScoringFailures,
        workers: int = 1,
        end: Callable[[], None] | None = None,
    ) -> None:
        self._score_group, self._failures, self._end = score_group, failures, end
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="reward") if workers > 1 else None

    def score(self, groups: Sequence[Group]) -> list[list[float | None]]:
        """One list per group, None where a sample could not be scored. Raises when nothing can be any more."""
        return [self._failures.record_group(scored) for scored in self._score_groups(groups)]

    def preview(self, groups: Sequence[Group]) -> list[GroupScores]:
        """The scores with the reasons of those that are missing, none of which is counted."""
        return list(self._score_groups(groups))

    def close(self) -> None:
        """End what was started, and warn how much could not be scored."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        if self._end is not None:
            self._end()
        self._failures.close()

    def _score_groups(self, groups: Sequence[Group]) -> Iterator[GroupScores]:
        go = map if self._threads is None else self._threads.map
        return go(lambda group: self._score_group(group) if group else GroupScores([]), groups)


def score_each(rate: Callable[[Completion], float]) -> Callable[[Group], GroupScores]:
    """Scores a group sample by sample; one for which `rate` raises UnscorableError has none."""

    def score_group(group: Group) -> GroupScores:
        values, failures = list[float | None](), list[ScoringFailure]()
        for completion in group:
            try:
                values.append(rate(completion))
            except UnscorableError as reason:
                values.append(None)
                failures.append(ScoringFailure(reason.kind, str(reason)))
        return GroupScores(values, tuple(failures))

    return score_group


def require_column(completion: Completion, name: str, option: str) -> Any:
    """The value of a column. Raises UnscorableError where the row has none; `option` names the column."""
    value = column_value(completion.prompt.columns, name)
    if value is None:
        has = ", ".join(completion.prompt.columns) or "none"
        state = "is empty (null)" if name in completion.prompt.columns else "is not there"
        raise UnscorableError(f"no column {name}", f"column '{name}' {state}; the row has: {has} (set reward.{option})")
    return value


def require_text(completion: Completion, name: str, option: str) -> str:
    """The text of a column of texts or numbers, or of the only element of a list.

    Raises UnscorableError where the row has none, and DataError for another value: its text would be no answer.
    """
    value = require_column(completion, name, option)
    sole = value[0] if isinstance(value, list | tuple) and len(value) == 1 else value
    if isinstance(sole, str | int | float) and not isinstance(sole, bool):
        return str(sole)
    inner = " or ".join(f"reward.{option}={path}" for path in nested_names(name, value))
    raise DataError(
        f"reward.{option}={name}: expected text or a number, found {json_type_name(value)}, in the row of the prompt "
        f"{shorten(completion.prompt.text, 60, end=True)!r}\n"
        f"  type {inner or f'reward.{option}=NAME, a column of text or numbers'}"
    )


def reward_arguments(group: Sequence[Completion]) -> dict[str, Any]:
    """name → one value per answer of the group. Raises DataError for a column named like an argument."""
    columns = dict.fromkeys(name for completion in group for name in completion.prompt.columns)
    results = [completion.environment for completion in group if completion.environment is not None]
    for name in (*RESERVED_ARGUMENTS, *TRL_ARGUMENTS, *(ENVIRONMENT_ARGUMENTS if results else ())):
        if name in columns:
            raise DataError(
                f"the data has a column '{name}', a name that the run passes to rewards itself\n  rename the column"
            )
    return {
        "prompts": [c.prompt.as_argument() for c in group],
        "completions": [_completion(c) for c in group],
        "completion_ids": [list(c.ids) for c in group],
        **{name: [c.prompt.columns.get(name) for c in group] for name in columns},
        **({"environment_scores": [one.score for one in results]} if results else {}),
        **({"environments": [dict(one.state) for one in results]} if results else {}),
    }


def encode_json(content: Mapping[str, Any]) -> bytes:
    """JSON, ASCII only. Raises DataError for a value that JSON has no form for."""
    try:
        return json.dumps(content).encode("ascii")
    except (TypeError, ValueError) as error:
        raise DataError(
            f"a column of the data cannot be sent to the reward as JSON: {error}\n"
            "  convert it to text, numbers, lists and objects, or remove the column"
        ) from error


def _completion(completion: Completion) -> str | list[dict[str, Any]]:
    """The text, or the messages that came after the prompt's."""
    before = completion.prompt.messages
    if before is None:
        return completion.text
    if completion.messages is None:
        return [{"role": "assistant", "content": completion.text}]
    return [dict(m) for m in completion.messages[len(before) :]]


def refuse_wrong_scores(name: str, found: Any, groups: Sequence[Sequence[Completion]]) -> None:
    """Raise EnvironmentProblem unless a reward returned a finite number or None for each completion."""
    shape = isinstance(found, list) and [len(one) if isinstance(one, list) else None for one in found]
    if shape == [len(group) for group in groups] and all(
        score is None or (isinstance(score, Real) and math.isfinite(score)) for one in found for score in one
    ):
        return
    raise EnvironmentProblem(
        f"{name}: score() returned {found!r:.200}\n  expected a list for each of {len(groups)} groups, with a finite "
        "number or None for each completion; runner.testing.check_reward tests a reward"
    )
