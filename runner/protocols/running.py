"""What hangs on the loop: callbacks and trackers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from runner.protocols.learning import Sample, State


@dataclass(slots=True)
class StepEnd:
    """A finished step on its way through the callbacks, which may add numbers.

    step counts finished steps (1-based); samples are what the step learnt from, some of which are kept; `last` is
    true at the end of the run; `stopping` when a signal asked to end here.
    """

    step: int
    values: dict[str, float]
    last: bool
    samples: Sequence[Sample] = ()
    stopping: bool = False


class Callback(Protocol):
    """Hangs on the loop: sees the start, each finished step and the end; may own state that is checkpointed."""

    def on_start(self, step: int) -> None: ...

    def on_step(self, end: StepEnd) -> None: ...

    def on_end(self) -> None: ...

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: State) -> None: ...


class Tracker(Protocol):
    """A sink for metrics; must never raise because of an outage, and never block a step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None: ...

    def finish(self, status: str) -> list[str]: ...  # lines to print at the end, e.g. how to sync
