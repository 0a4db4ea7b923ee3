"""How a step learns: processes, losses, models, learners, algorithms, callbacks, trackers.

Legend: N rows, T tokens, S of them (see `runner.core.batch`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor, nn

    from runner.core.batch import Batch
    from runner.core.metrics import Metrics
    from runner.interfaces.environments import Environments, ExtendConversation
    from runner.interfaces.model import Decide
    from runner.interfaces.sampling import Data, Reward, Sampler

T = TypeVar("T")


class PipelineOp(NamedTuple):
    """A pass of micro-batch `micro` through run of layers `chunk` of this rank."""

    micro: int
    chunk: int = 0
    backward: bool = False


class RankCollectives(Protocol):
    """The data ranks of a job as one of them, `rank` of `size`, sees them.

    Every verb is collective: all ranks call the same ones in the same order. Each raises DeadlineExceeded where a rank
    does not come.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    # what each rank gave, in the order of the ranks: plain values, records of them, tensors on the CPU
    def all_gather(self, value: T) -> list[T]: ...

    # the same of named tensors, which come back on the device they are on here
    def all_gather_tensors(self, tensors: Mapping[str, Tensor]) -> list[Mapping[str, Tensor]]: ...

    # in place, on their device; all ranks give the same shapes and data types; half precision is added in float32
    def all_reduce_(self, tensors: Sequence[Tensor]) -> None: ...

    # begins the same of tensors of one data type, which must not change before what it returns has ended it
    def start_all_reduce(self, tensors: Sequence[Tensor]) -> Callable[[], None]: ...

    # in place, on its device: becomes the first rank's, byte for byte; all give the same shape and type, contiguous
    def broadcast_(self, tensor: Tensor) -> None: ...


class GradientReducer(Protocol):
    """Combines the ranks' gradients into those of one process."""

    # a block with a backward pass of a mini-batch; the last one also adds what other ranks found, in place: collective,
    # so after an error on a single rank no rank may continue
    def backward(self, parameters: Sequence[nn.Parameter], is_last: bool) -> AbstractContextManager[None]: ...

    # drop what the backward passes of an unfinished mini-batch have left
    def discard(self) -> None: ...

    # the 2-norm of all gradients together, float32 [], equal on all ranks: collective
    def total_norm(self, parameters: Sequence[nn.Parameter]) -> Tensor: ...


class PipelineStage(Protocol):
    """The layers of a model on this rank: one run of layers or, interleaved, several."""

    @property
    def is_last(self) -> bool: ...  # whether the run of layers that is entered is the last, and the heads follow it

    @property
    def index(self) -> int: ...  # how many runs of layers come before it

    @property
    def num_stages(self) -> int: ...  # how many ranks a micro-batch passes through

    @property
    def absent_modules(self) -> frozenset[nn.Module | nn.Parameter]: ...  # layers and parameters that other ranks have

    # parameters that the first and the last rank both have, each with a part of the gradient
    def tied_parameters(self) -> Sequence[Tensor]: ...

    # the passes of so many micro-batches, in the order in which no rank waits for ever
    def schedule(self, count: int) -> Sequence[PipelineOp]: ...

    def forward_schedule(self, count: int) -> Sequence[PipelineOp]: ...  # those of passes without gradient

    def begin_op(self, op: PipelineOp) -> None: ...  # the next pass is this one

    # all parameters that are here have their numbers, and will stay these objects
    def on_parameters_ready(self) -> None: ...

    # what `run` makes of a transformers model's forward, or of as much of it as lies here
    def run_local(self, run: Callable[[Callable[..., Any]], Tensor], forward: Callable[..., Any]) -> Tensor: ...


LOGPROBS = frozenset({"logprobs"})  # what most losses need
Outputs = Mapping[str, "Tensor"]  # name → [T] (or [N]) tensor
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
    """A loss linear in the logprobs: total = Σ grad_weights · logprobs.

    The LM head's gradient is therefore computed chunk by chunk, like the logits.
    """

    @property
    def needs(self) -> frozenset[str]: ...

    def __call__(self, batch: Batch, outputs: Outputs) -> Loss: ...

    def grad_weights(self, batch: Batch) -> Tensor: ...  # float32 [T], constant


# logits [S, V] of some tokens, and those tokens' channels [S, …] → named terms [S], of which "loss" is trained on
LogitTermsFn = Callable[["Tensor", Mapping[str, "Tensor"]], Mapping[str, "Tensor"]]


@runtime_checkable
class LogitsLossFn(LinearLossFn, Protocol):
    """A loss of whole distributions: total = Σ grad_weights · terms["loss"], terms computed from logits.

    Terms and their gradient are computed chunk by chunk, like the logits: [T, vocab] never exists at once.

    needs           the names of terms, which take the place of the model's outputs
    extra_channels  what `logit_terms` reads beside the channels of a micro-batch on the device: [T, …]
    """

    def logit_terms(self, logits: Tensor, tokens: Mapping[str, Tensor]) -> Mapping[str, Tensor]: ...  # see LogitTermsFn

    def extra_channels(self, micro: Batch) -> Mapping[str, Tensor]: ...


class Model(Protocol):
    """Anything that scores a packed batch without gradient."""

    def forward(self, batch: Batch, needs: frozenset[str]) -> Outputs: ...


@dataclass(frozen=True, slots=True)
class OptimSettings:
    """Settings of one optimizer step, which the caller chooses each time.

    weight_decay: decoupled, of matrices; clip_norm: the largest norm of the whole gradient, None = it is not clipped
    """

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float = 0.0
    clip_norm: float | None = None


class Learner(Model, Protocol):
    """One trained model: scores, learns and steps."""

    def begin_step(self, step: int) -> None: ...  # 0-based: sets the learning rate and the dropout streams

    # adds to the gradients; where it raises they are as before
    def forward_backward(
        self, batch: Batch, loss: LossFn, keep: frozenset[str] = frozenset()
    ) -> tuple[Metrics, Outputs]: ...

    def measure(self, batch: Batch, loss: LossFn) -> Outputs: ...  # what the loss reads of it, without gradient

    def optim_step(self, settings: OptimSettings | None = None) -> Metrics: ...  # None: those it was built with

    # both, of one mini-batch; its metrics are read when what it returns is called, which raises as both do
    def update(self, batch: Batch, loss: LossFn) -> Callable[[], Metrics]: ...

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


@dataclass(slots=True)
class StepResult:
    """A finished step on its way through the callbacks, which may add numbers.

    step counts finished steps (1-based); samples are what the step trained on, some of which are kept; `last` is
    true at the end of the run; `stopping` when a signal requested the end, `saving` when one requested a checkpoint.
    """

    step: int
    values: dict[str, float]
    last: bool
    samples: Sequence[Sample] = ()
    stopping: bool = False
    saving: bool = False


class Callback(Protocol):
    """Is called at the start, after each step and at the end; may own state that is checkpointed."""

    def on_start(self, step: int) -> None: ...

    def on_step(self, end: StepResult) -> None: ...

    def on_end(self) -> None: ...

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: State) -> None: ...


class BaseCallback:
    """Implements every event by doing nothing, and has no state."""

    def on_start(self, step: int) -> None:
        """The run begins; `step` steps are done."""

    def on_step(self, end: StepResult) -> None:
        """A step is finished."""

    def on_end(self) -> None:
        """All steps are done."""

    def state_dict(self) -> State:
        """No state."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """No state."""


class Tracker(Protocol):
    """A sink for metrics; must never raise because of an outage, and never block a step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None: ...

    def finish(self, status: str) -> list[str]: ...  # lines to print at the end, e.g. how to sync


class HeadedModel(Model, Protocol):
    """A frozen model, and its head by itself."""

    # of a micro-batch, which is one rank's own
    def forward_local(self, batch: Batch, needs: frozenset[str]) -> Outputs: ...

    # output `hidden` [S, H] → logits [S, V]; or UnsupportedModelError
    def lm_head(self) -> Callable[[Tensor], Tensor]: ...


@dataclass(frozen=True, slots=True)
class AlgorithmInputs:
    """What `build` gives to every algorithm; sampler, reward and environments may be None.

    frozen_models: the models that only score, by role; extend: continues a conversation by an environment's message
    """

    data: Data
    tokenizer: Any
    seed: int
    decide: Decide
    sampler: Sampler | None = None
    reward: Reward | None = None
    environments: Environments | None = None
    frozen_models: Mapping[Role, HeadedModel] = field(default_factory=dict)
    extend: ExtendConversation | None = None


class OfflineAlgorithm:
    """The parts of the `Algorithm` protocol for algorithms without a sampler and without state."""

    lag = 0

    def describe(self, step: int, experience: Experience) -> tuple[Mapping[str, float], Sequence[Sample]]:
        """Nothing: what is trained on is in the data."""
        return {}, ()

    def observe(self, step: int, values: Mapping[str, float]) -> None:
        """Nothing adapts."""

    def encode(self, experience: Experience) -> State:
        """Never called: at lag 0 nothing is collected ahead."""
        raise NotImplementedError(f"{type(self).__name__} does not collect ahead")

    def decode(self, state: State) -> Any:
        """Never called: at lag 0 nothing is collected ahead."""
        raise NotImplementedError(f"{type(self).__name__} does not collect ahead")

    def state_dict(self) -> State:
        """Nothing: the position in the data is a function of the step."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Nothing to restore."""
