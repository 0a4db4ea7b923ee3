"""Try a reward on real rows before the model is loaded: a function that raises ends the job there.

    rows ──their answer as the completion──▶ GroupScorer.preview ──▶ scores, which are shown; or DataError
         ──the next row's answer───────────▶ GroupScorer.preview ──▶ a warning where it is worth as much

Nothing is counted: a row that cannot be scored is shown, and does not bring the job nearer to `reward.max_failures`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from runner.core.errors import DataError
from runner.core.untrusted_text import shorten
from runner.interfaces import Completion, Decide, Prompt, Reward
from runner.interfaces.rewards import GroupScorer, GroupScores, UnscorableError, require_text
from runner.reward.base import ANSWER, RewardConfig, require_components
from runner.reward.config import SumConfig
from runner.reward.sum import WeightedSumReward

log = logging.getLogger("runner")
ROWS = 4
SHOWN = 60  # characters of an answer in a warning, its last ones


def try_reward(
    reward: Reward,
    config: RewardConfig,
    prompts: Sequence[Prompt],
    tokenizer: Any,
    decide: Decide,
    option: str = "reward",
) -> None:
    """Score each row's own answer and show the scores; option: the option of the reward.

    Warns where that scores 0, or where another row's answer scores as much. Raises DataError where a function raises.
    """
    for name, scorer, column in _scorers(reward, config, option):
        answers = [_answer(prompt, column or ANSWER, tokenizer) for prompt in prompts]
        own = [a or _completion(p, p.text, tokenizer) for a, p in zip(answers, prompts, strict=True)]
        scored = scorer.preview([[completion] for completion in own])
        shown = [_format_scores(name, at, one) for at, one in enumerate(scored, 1)]
        given = f"its column {column or ANSWER}" if all(answers) else "its prompt"
        decide.record_fact(name, "; ".join(shown), f"tested before the first step, with {given} as completion")
        rights = [value for one in scored for value in one.values if value is not None]
        if column is not None and all(answers) and len(rights) == len(own):
            _warn_of_equal_scores(name, column, scorer, own, rights, tokenizer)


def _warn_of_equal_scores(
    name: str, column: str, scorer: GroupScorer, own: Sequence[Completion], rights: Sequence[float], tokenizer: Any
) -> None:
    """Warn where a row's own answer scores 0, or no row's scores more than the next row's."""
    others = [
        _completion(one.prompt, other.text, tokenizer) for one, other in zip(own, [*own[1:], own[0]], strict=True)
    ]
    rows = [
        at for at, (one, other) in enumerate(zip(own, others, strict=True)) if one.text.strip() != other.text.strip()
    ]
    wrongs = dict(zip(rows, (s.values[0] for s in scorer.preview([[others[at]] for at in rows])), strict=True))
    for at, right in enumerate(rights):
        if right == 0 and (wrongs.get(at) or 0) >= 0:
            text = f"{name} gives row {at + 1} 0 for its own answer, the column {column}: {_end(own[at])}"
            log.warning("%s; if it expects another form, such as tags around the answer, this is no fault", text)
            return
    if rows and all((wrong := wrongs[at]) is not None and wrong >= rights[at] for at in rows):
        text = f"{name} gives another row's answer as much as the row's own: row {rows[0] + 1} {rights[rows[0]]:g} for"
        log.warning("%s %s, %g for %s", text, _end(own[rows[0]]), wrongs[rows[0]], _end(others[rows[0]]))


def _end(completion: Completion) -> str:
    return repr(shorten(completion.text, SHOWN, end=True))


def _answer(prompt: Prompt, column: str, tokenizer: Any) -> Completion | None:
    """The row's own answer as a completion; None where the column has none."""
    try:
        return _completion(prompt, require_text(_completion(prompt, "", tokenizer), column, "column"), tokenizer)
    except (UnscorableError, DataError):  # a scorer that needs it says so itself
        return None


def _completion(prompt: Prompt, text: str, tokenizer: Any) -> Completion:
    """The text as if it had been sampled."""
    ids = tuple(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    turn = {"role": "assistant", "content": text}
    return Completion(prompt, ids, text, "stop", None if prompt.messages is None else (*prompt.messages, turn))


def _scorers(reward: Reward, config: RewardConfig, name: str) -> Iterator[tuple[str, GroupScorer, str | None]]:
    """Each part that is no model, with the option that it is and the column with right completions."""
    if isinstance(reward, WeightedSumReward):
        assert isinstance(config, SumConfig)
        for at, ((_, part), component) in enumerate(zip(reward.parts, require_components(config.parts), strict=True)):
            yield from _scorers(part, component.config, f"{name}.parts[{at}]")
    elif isinstance(reward, GroupScorer):
        yield name, reward, config.answer_column()


def _format_scores(name: str, row: int, scored: GroupScores) -> str:
    """`row 1: 0.5`, or why it has no score. Raises DataError where the function raised."""
    if scored.raised:
        raise DataError(
            f"{name} raises an exception on row {row} of the data:\n"
            f"  {scored.failures[0].message}\n"
            "  fix the function; it may return None for a sample without a score. The traceback is in reward.log"
        )
    reason = scored.failures[0].message if scored.failures else "None"
    return f"row {row}: " + ", ".join(reason if value is None else f"{value:g}" for value in scored.values)
