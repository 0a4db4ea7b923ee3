"""Try a reward on two real rows before the model is loaded: a function that raises ends the job there.

    rows ──their answer as the completion──▶ GroupScorer.preview ──▶ scores, which are shown; or DataError

Nothing is counted: a row that cannot be scored is shown, and does not bring the job nearer to `reward.max_failures`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from runner.core.errors import DataError
from runner.interfaces import Completion, Decide, Prompt, Reward
from runner.interfaces.rewards import GroupScorer, GroupScores
from runner.reward.sum import WeightedSumReward

ROWS = 2
ANSWER = "answer"  # the column that most data has the right answer in


def try_reward(
    reward: Reward, prompts: Sequence[Prompt], tokenizer: Any, decide: Decide, option: str = "reward"
) -> None:
    """Score a completion of each prompt and show the scores; option: the option of the reward.

    Raises DataError where a function raises.
    """
    groups = [[_completion(prompt, tokenizer)] for prompt in prompts]
    for name, scorer in _scorers(reward, option):
        shown = [_format_scores(name, at, scored) for at, scored in enumerate(scorer.preview(groups), 1)]
        known = all(ANSWER in prompt.columns for prompt in prompts)
        given = f"its column {ANSWER}" if known else "its prompt"
        decide.record_fact(name, "; ".join(shown), f"tested before the first step, with {given} as completion")


def _completion(prompt: Prompt, tokenizer: Any) -> Completion:
    """The row's own answer, or else its prompt, as if it had been sampled."""
    text = str(prompt.columns.get(ANSWER, prompt.text))
    ids = tuple(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    turn = {"role": "assistant", "content": text}
    return Completion(prompt, ids, text, "stop", None if prompt.messages is None else (*prompt.messages, turn))


def _scorers(reward: Reward, name: str) -> Iterator[tuple[str, GroupScorer]]:
    """Each part that is no model, with the option that it is."""
    if isinstance(reward, WeightedSumReward):
        for at, (_, part) in enumerate(reward.parts):
            yield from _scorers(part, f"{name}.parts[{at}]")
    elif isinstance(reward, GroupScorer):
        yield name, reward


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
