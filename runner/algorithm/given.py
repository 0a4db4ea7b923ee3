"""What algorithms have in common that learn from given data: nothing runs ahead, nothing is remembered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from runner.protocols import Experience, Sample, State


class LearnsFromData:
    """The parts of the `Algorithm` protocol that need a sampler or a memory, for those that have neither."""

    lag = 0

    def describe(self, step: int, experience: Experience) -> tuple[Mapping[str, float], Sequence[Sample]]:
        """Nothing: what is learnt is in the data."""
        return {}, ()

    def observe(self, step: int, values: Mapping[str, float]) -> None:
        """Nothing adapts."""

    def encode(self, experience: Experience) -> State:
        """Never called: at lag 0 nothing is collected ahead."""
        raise NotImplementedError(f"{type(self).__name__} collects nothing ahead")

    def decode(self, state: State) -> Any:
        """Never called: at lag 0 nothing is collected ahead."""
        raise NotImplementedError(f"{type(self).__name__} collects nothing ahead")

    def state_dict(self) -> State:
        """Nothing: the position in the data is a function of the step."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Nothing to restore."""
