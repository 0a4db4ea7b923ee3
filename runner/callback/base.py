"""A callback that does nothing, to be narrowed."""

from __future__ import annotations

from runner.protocols import State, StepEnd


class NoOp:
    """Implements every event by doing nothing, and has no state."""

    def on_start(self, step: int) -> None:
        """The run begins; `step` steps are done."""

    def on_step(self, end: StepEnd) -> None:
        """A step is finished."""

    def on_end(self) -> None:
        """All steps are done."""

    def state_dict(self) -> State:
        """No state."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """No state."""
