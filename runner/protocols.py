"""The seams: what the loop, the learner and the algorithms know of one another.

Legend: N rows, T tokens (see `runner.batch`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from runner.batch import Batch
from runner.identity import PromptStyle
from runner.metrics import Metrics

N = TypeVar("N", int, float)
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
    """

    def terms(self, logits: Tensor, tokens: Mapping[str, Tensor]) -> Mapping[str, Tensor]: ...  # see Terms


class Model(Protocol):
    """Anything that scores a ragged batch without gradient."""

    def forward(self, batch: Batch, needs: frozenset[str]) -> Outputs: ...


class Learner(Model, Protocol):
    """One trained model: scores, learns and steps."""

    def begin_step(self, step: int) -> None: ...  # 0-based: sets the learning rate and the dropout streams

    def forward_backward(
        self, batch: Batch, loss: LossFn, keep: frozenset[str] = frozenset()
    ) -> tuple[Metrics, Outputs]: ...

    def optim_step(self) -> Metrics: ...

    def weights(self) -> Iterator[tuple[str, Tensor]]: ...  # what learns, under the module's names

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: State) -> None: ...


class Ranks(Protocol):
    """The data ranks, as an algorithm sees them."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, values: Mapping[str, N]) -> dict[str, N]: ...


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

    def prepare(self, experience: Experience, models: Mapping[Role, Model], ranks: Ranks) -> Iterator[Batch]: ...

    def describe(self, step: int, experience: Experience) -> tuple[Mapping[str, float], Sequence[Sample]]: ...

    def observe(self, step: int, values: Mapping[str, float]) -> None: ...

    def encode(self, experience: Experience) -> State: ...

    def decode(self, state: State) -> Experience: ...

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: State) -> None: ...


@dataclass(frozen=True, slots=True)
class Item:
    """A tokenised row of data: ids and weights of equal length (weight 1 = learnt, 0 = context)."""

    ids: tuple[int, ...]
    weights: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to one prompt, of which the first is preferred. `margin` says by how much, where the data knows.

    A completion holds everything after the prompt, its end included; all of its tokens count.
    """

    prompt: tuple[int, ...]
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]
    margin: float | None = None


@dataclass(frozen=True, slots=True)
class Judged:
    """One answer to a prompt, and whether it is a good one."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    good: bool


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is asked in a rollout. `columns` are the row's other columns (JSON-able), which the reward sees.

    messages: the conversation so far, if the row has one; text: what `ids` say.
    """

    ids: tuple[int, ...]
    text: str
    messages: tuple[Mapping[str, Any], ...] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Question:
    """A held-out item: its tokens, and, where it has an answer, what to ask and what to expect.

    `prompt_ids` is empty for plain text, of which only the loss can be measured. messages, columns: as of a `Prompt`,
    where the row has them; for an environment.
    """

    item: Item
    prompt_ids: tuple[int, ...] = ()
    prompt: str = ""
    answer: str = ""
    messages: tuple[Mapping[str, Any], ...] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Request:
    """One answer to be sampled. Equal `group`s have the very same prompt, which is computed once.

    seed: of this request's own random stream, derived by the caller from (seed, step, prompt, sample, turn).
    """

    prompt: tuple[int, ...]
    seed: int
    max_new_tokens: int
    group: int


@dataclass(frozen=True, slots=True)
class Rollout:
    """A sampled answer.

    ids: the new tokens, the end token included if it was drawn
    logprobs: of the distribution really sampled from (tempered, truncated); raw_logprobs: at temperature 1, untruncated
    version: of the weights that drew it; finish: "stop" or "length"
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    raw_logprobs: tuple[float, ...]
    version: int
    finish: str


class Sampler(Protocol):
    """Draws rollouts from a policy whose weights come from the trainer."""

    @property
    def temperature(self) -> float: ...

    @property
    def max_new_tokens(self) -> int: ...  # of one answer

    def load(self, tensors: Mapping[str, Tensor] | None, version: int) -> None: ...  # None: shares the trainer's own

    def sample(self, requests: Sequence[Request]) -> list[Rollout]: ...  # in the order of the requests


@dataclass(frozen=True, slots=True)
class Completion:
    """An answer as a reward sees it.

    ids: of all of the policy's turns; text: of the last one; messages: the whole conversation, where there is one
    """

    prompt: Prompt
    ids: tuple[int, ...]
    text: str
    finish: str
    messages: tuple[Mapping[str, Any], ...] | None = None


@dataclass(frozen=True, slots=True)
class Observation:
    """What an environment says to a turn of the policy; context for the next turn, and never learnt."""

    role: str
    text: str


class Environment(Protocol):
    """One episode's counterpart, used once: hears a turn, answers it, or ends the episode with None."""

    def reset(self, prompt: Prompt) -> None: ...

    def step(self, answer: str) -> Observation | None: ...


@dataclass(frozen=True, slots=True)
class Environments:
    """Makes an environment for each episode, of at most `max_turns` turns of the policy."""

    make: Callable[[], Environment]
    max_turns: int


class Reward(Protocol):
    """Scores all samples of a prompt at once; None = could not be scored, which is not 0."""

    def score(self, groups: Sequence[Sequence[Completion]]) -> list[list[float | None]]: ...

    def close(self) -> None: ...


class Data(Protocol):
    """Items of one kind (see `ItemKind`) as a pure function of the step."""

    @property
    def fingerprint(self) -> str: ...  # sha256 of everything that the items depend on

    @property
    def style(self) -> PromptStyle: ...  # whether what is asked goes through the chat template

    def __len__(self) -> int: ...

    # items step·count … of the endless seeded order; a round above 0 refills a step from an order of its own
    def take(self, step: int, count: int, round: int = 0) -> Sequence[Any]: ...

    def held_out(self) -> Sequence[Question]: ...  # what can be asked; empty if there is nothing

    def held_out_items(self) -> Sequence[Any]: ...  # pairs or judged answers held out; empty for other kinds


class VarlenAttention(Protocol):
    """Causal attention within sequences that lie end to end, by a kernel of a device's own.

    query [Q, heads, d]; key, value [K, kv heads, d], all of one data type and on the device; returns [Q, heads, d].
    Sequence i has query_lengths[i] queries, which are the last of its key_lengths[i] tokens: query q of it sees the
    keys up to its own, and with a window only the last `window` of those, its own included.
    """

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        query_lengths: tuple[int, ...],
        key_lengths: tuple[int, ...],
        window: int | None,
        dropout: float,
        scale: float,
    ) -> Tensor: ...


class Device(Protocol):
    """Where tensors live, and which kernels run on them."""

    name: str
    torch_device: torch.device

    def prepare(self) -> None: ...  # threads, determinism, current device

    def synchronize(self) -> None: ...

    def peak_memory_bytes(self) -> int: ...

    def describe(self) -> dict[str, Any]: ...

    # each tells, by name, what the device is doing now: busy, temperature, memory; may take a second
    def readings(self) -> Sequence[Callable[[], Mapping[str, float]]]: ...

    def attention(self, dtype: torch.dtype) -> VarlenAttention | None: ...  # None: torch's own, row by row

    def fuse(self, module: torch.nn.Module) -> None: ...  # exchange what of a transformers model has fused operators


class Decide(Protocol):
    """Records an automatic decision: printed, in the manifest, an error under strict=true.

    Where `got` is what was wanted it is a fact, which strict=true allows; `state` says one.
    """

    def __call__(self, feature: str, wanted: str, got: str, reason: str) -> None: ...

    def state(self, feature: str, value: str, reason: str) -> None: ...


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
