"""What most rewards are: something that scores one group, asked for many, with its faults kept account of.

    groups ──▶ ask(group), `workers` at a time ──▶ Scored ──▶ Faults ──▶ scores in the order of the groups

The factory of every reward is called with the keywords device, tokenizer, seed, decide, folder and fit, and names those
that it needs. `fit` gives a transformers model that is on the
device the device's own operators and attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from runner.reward.faults import Fault, Faults, Scored, Unscorable

if TYPE_CHECKING:
    from runner.interfaces import Completion

Group = Sequence["Completion"]


class Scorer:
    """A reward made of `ask`; with more than one worker it is asked from threads, that many at a time."""

    def __init__(
        self, ask: Callable[[Group], Scored], faults: Faults, workers: int = 1, end: Callable[[], None] | None = None
    ) -> None:
        self._ask, self._faults, self._end = ask, faults, end
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="reward") if workers > 1 else None

    def score(self, groups: Sequence[Group]) -> list[list[float | None]]:
        """One list per group, None where a sample could not be scored. Raises when nothing can be any more."""
        return [self._faults.take(scored) for scored in self._scored(groups)]

    def close(self) -> None:
        """End what was started, and say what could not be scored."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        if self._end is not None:
            self._end()
        self._faults.close()

    def _scored(self, groups: Sequence[Group]) -> Iterator[Scored]:
        return map(self._ask, groups) if self._threads is None else self._threads.map(self._ask, groups)


def each(rate: Callable[[Completion], float]) -> Callable[[Group], Scored]:
    """Scores a group sample by sample; one for which `rate` raises Unscorable has none."""

    def ask(group: Group) -> Scored:
        values, faults = list[float | None](), list[Fault]()
        for completion in group:
            try:
                values.append(rate(completion))
            except Unscorable as reason:
                values.append(None)
                faults.append(Fault(reason.kind, str(reason)))
        return Scored(values, tuple(faults))

    return ask


def column(completion: Completion, name: str, option: str) -> Any:
    """The value of a column. Raises Unscorable where the row has none or nothing in it; `option` named the column."""
    value = completion.prompt.columns.get(name)
    if value is None:
        has = ", ".join(completion.prompt.columns) or "none"
        state = "is empty (null)" if name in completion.prompt.columns else "is not there"
        raise Unscorable(f"no column {name}", f"column '{name}' {state}; the row has: {has} (set reward.{option})")
    return value
