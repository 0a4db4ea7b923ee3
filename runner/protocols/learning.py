"""How a step learns: losses, models, learners, algorithms.

Legend: N rows, T tokens, S of them (see `runner.batch`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from runner.batch import Batch
from runner.metrics import Metrics

LOGPROBS = frozenset({"logprobs"})  # what most losses need
Outputs = Mapping[str, Tensor]  # name → [T] (or [N]) tensor
State = dict[str, Any]  # JSON-able values; tensors only under the key "tensors"
Role = str  # "policy", "critic", ...


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss's value (a scalar that has been divided by the total it means) and its metrics."""

    total: Tensor
    metrics: Metrics


class LossFn(Protocol):
    """A pure function of a micro-batch and the model's outputs on it."""

    @property
    def needs(self) -> frozenset[str]: ...

    def __call__(self, batch: Batch, outputs: Outputs) -> Loss: ...


@runtime_checkable
class LinearLossFn(Protocol):
    """A loss linear in the logprobs: total = Σ coefficients · logprobs, so that the LM head's gradient
    is made in the chunk that made the logits."""

    @property
    def needs(self) -> frozenset[str]: ...

    def __call__(self, batch: Batch, outputs: Outputs) -> Loss: ...

    def coefficients(self, batch: Batch) -> Tensor: ...  # float32 [T], constant


# logits [S, V] of some tokens, and those tokens' channels [S, …] → named terms [S], of which "loss" is learnt
Terms = Callable[[Tensor, Mapping[str, Tensor]], Mapping[str, Tensor]]


@runtime_checkable
class LogitsLossFn(LinearLossFn, Protocol):
    """A loss of whole distributions: total = Σ coefficients · terms["loss"], where the terms are functions of a token's
    logits. They are made, with their gradient, in the chunk that made the logits: [T, vocab] never exists at once.

    needs   the names of terms, which stand where other losses have the model's outputs
    beside  what `terms` reads beside the channels of a micro-batch that is on the device: [T, …], made for it alone
    """

    def terms(self, logits: Tensor, tokens: Mapping[str, Tensor]) -> Mapping[str, Tensor]: ...  # see Terms

    def beside(self, micro: Batch) -> Mapping[str, Tensor]: ...


class Model(Protocol):
    """Anything that scores a ragged batch without gradient."""

    def forward(self, batch: Batch, needs: frozenset[str]) -> Outputs: ...


class Learner(Model, Protocol):
    """One trained model: scores, learns and steps."""

    def begin_step(self, step: int) -> None: ...  # 0-based: sets the learning rate and the dropout streams

    def forward_backward(
        self, batch: Batch, loss: LossFn, keep: frozenset[str] = frozenset()
    ) -> tuple[Metrics, Outputs]: ...

    def measure(self, batch: Batch, loss: LossFn) -> Outputs: ...  # what the loss reads of it, without gradient

    def optim_step(self) -> Metrics: ...

    def weights(self) -> Iterator[tuple[str, Tensor]]: ...  # what learns, under the module's names

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: State) -> None: ...


Experience = Any  # what one step learns from; picklable
Sample = Mapping[str, Any]  # a line of samples.jsonl


class Algorithm(Protocol):
    """How a step learns, with no model in sight.

    collect   may run ahead of the trainer in a thread: data, sampler, reward; never the trainer's models
    prepare   a generator: before its first batch the policy is as it was, between batches it has moved
    describe  numbers and samples of an experience; observe sees a finished step's numbers
    encode    an experience that was collected ahead, as a checkpoint keeps it; decode is its inverse
    """

    losses: Mapping[Role, LossFn]

    @property
    def lag(self) -> int: ...

    def collect(self, step: int) -> Experience: ...

    def prepare(self, experience: Experience, models: Mapping[Role, Model]) -> Iterator[Batch]: ...

    def describe(self, step: int, experience: Experience) -> tuple[Mapping[str, float], Sequence[Sample]]: ...

    def observe(self, step: int, values: Mapping[str, float]) -> None: ...

    def encode(self, experience: Experience) -> State: ...

    def decode(self, state: State) -> Experience: ...

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: State) -> None: ...
