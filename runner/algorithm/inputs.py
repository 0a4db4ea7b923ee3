"""What an algorithm is made of beside its config, and what those that learn from given data have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from runner.core.batch import Batch
from runner.interfaces import (
    Data,
    Decide,
    EnvironmentFactory,
    Experience,
    ExtendConversation,
    Model,
    Outputs,
    Reward,
    Role,
    Sample,
    Sampler,
    State,
)


class HeadedModel(Model, Protocol):
    """A frozen model, and its head by itself."""

    def forward_local(
        self, batch: Batch, needs: frozenset[str]
    ) -> Outputs: ...  # of a micro-batch, which is one rank's own

    def lm_head(self) -> Callable[[Tensor], Tensor]: ...  # output `hidden` [S, H] → logits [S, V]; or UnfitModel


@dataclass(frozen=True, slots=True)
class AlgorithmInputs:
    """What `build` hands to every algorithm; sampler, reward and environments are None where the job has none.

    frozen_models: those that only score, by role; extend: what continues a conversation by an environment's message
    """

    data: Data
    tokenizer: Any
    seed: int
    decide: Decide
    sampler: Sampler | None = None
    reward: Reward | None = None
    environments: EnvironmentFactory | None = None
    frozen_models: Mapping[Role, HeadedModel] = field(default_factory=dict)
    extend: ExtendConversation | None = None


class OfflineAlgorithm:
    """The parts of the `Algorithm` protocol that need a sampler or a memory, for those that have neither: nothing runs
    ahead, nothing is remembered."""

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
