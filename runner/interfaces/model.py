"""A model that is trained, scored, sampled from and exported, as every other package sees it.

`CausalLM` is the largest: a policy. A policy with a value head, a reward model and a pipeline stage are less, and
raise SpecError for what they cannot do.

Legend: N rows, T tokens, S of them, H hidden size, V vocabulary (see `runner.core.batch`).

A `Device` says where tensors live; `Decide` reports an automatic choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, Self, TypedDict, TypeVar, Unpack, cast

import torch
from torch import Tensor, nn

from runner.core.batch import Batch
from runner.interfaces.learning import LogitTermsFn, PipelineStage
from runner.interfaces.routing import ExpertRouting
from runner.interfaces.sampling import ModelLimits

# Beside an exported reward model: {"score_position": "end_of_turn"}, the token that its score was trained at
REWARD_MODEL_FILE = "reward_model.json"


@dataclass(frozen=True, slots=True)
class SequenceLengths:
    """Lengths of sequences that lie end to end, as kernels take them.

    lengths: on the host; cumulative: int32 [n + 1] on the device, where they begin and end; longest: in tokens.
    """

    lengths: tuple[int, ...]
    cumulative: Tensor
    longest: int

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Self:
        """These lengths; the device is not waited for."""
        ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return cls(tuple(lengths), ends.to(device, non_blocking=True), max(lengths))


class VarlenOptions(TypedDict):
    """What `VarlenAttention` takes beside its tensors."""

    queries: SequenceLengths
    keys: SequenceLengths
    window: int | None
    dropout: float
    scale: float


class VarlenAttention(Protocol):
    """Causal attention within sequences that lie end to end, by a kernel of a device's own.

    query [Q, heads, d]; key, value [K, kv heads, d], all of one data type and on the device; returns [Q, heads, d].
    Sequence i has queries.lengths[i] queries, which are the last of its keys.lengths[i] tokens: query q of it sees the
    keys up to its own, and with a window only the last `window` of those, its own included. A compiled model traces the
    call: there a kernel must not read `lengths`, or it is compiled again for each batch.
    """

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **options: Unpack[VarlenOptions]) -> Tensor: ...


class DenseOptions(TypedDict):
    """What `DenseAttention` takes beside its tensors."""

    mask: Tensor | None
    causal: bool
    dropout: float
    scale: float


class DenseAttention(Protocol):
    """Attention of rows side by side, by a kernel of a device's own.

    query [B, heads, S, d]; key, value [B, kv heads, L, d], all of one data type and on the device; returns
    [B, heads, S, d]. mask: bool [B, 1 or heads, S, L], True = seen, or None: then every key is seen, or with `causal`,
    where S = L, those up to the query's own. The output is 0 where a query sees nothing.
    """

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **options: Unpack[DenseOptions]) -> Tensor: ...


class Device(Protocol):
    """Where tensors live, and which kernels run on them."""

    name: str
    torch_device: torch.device  # of this process, among those of its machine
    backend: str  # of process groups: "cpu:gloo,npu:hccl"

    def prepare(self) -> None: ...  # threads, determinism, current device

    def synchronize(self) -> None: ...

    def peak_memory_bytes(self) -> int: ...

    def describe(self) -> dict[str, Any]: ...

    # each tells, by name, what the device is doing now: busy, temperature, memory; may take a second
    def stats_readers(self) -> Sequence[Callable[[], Mapping[str, float]]]: ...

    # what matrix products of `dtype` are computed in: a data type, or tf32
    def matmul_precision(self, dtype: torch.dtype) -> str: ...

    # why it cannot compute with a data type; None where it can
    def unsupported_reason(self, dtype: torch.dtype) -> str | None: ...

    def varlen_attention(self, dtype: torch.dtype) -> VarlenAttention | None: ...  # None: torch's own, row by row

    def dense_attention(self) -> DenseAttention | None: ...  # None: the model's own, through transformers

    # replace the parts of a transformers model that the device, or `model.kernels`, has fused operators for
    def apply_fused_ops(self, module: torch.nn.Module, kernels: str | None = None) -> None: ...


class Decide(Protocol):
    """Records an automatic decision: printed, in the manifest, an error under strict=true.

    Where `got` is what was wanted it is a fact, which strict=true allows; `record_fact` records one.
    """

    def __call__(self, feature: str, wanted: str, got: str, reason: str) -> None: ...

    def record_fact(self, feature: str, value: str, reason: str) -> None: ...


ContextParallelStyle = Literal["ulysses", "ring"]
WeightSubset = Literal["all", "changed", "fixed", "base", "adapter"]  # see `runner.model.hf_state_dict`


class DecodingRow(Protocol):
    """A prompt and the ids that continue it."""

    @property
    def prompt_ids(self) -> tuple[int, ...]: ...

    @property
    def ids(self) -> Sequence[int]: ...  # new ones

    @property
    def is_finished(self) -> bool: ...


Row = TypeVar("Row", bound=DecodingRow)
# logits [R, V], and the R rows after which they come: each gets another id, which may finish it
ChooseTokens = Callable[[Tensor, Sequence[Row]], None]
# R rows, and the experts of their newest tokens, the prompt at first: int16 [L, M, k]
RecordExperts = Callable[[Row, Tensor], None]
# Called between two tokens: what loads newer weights, outside of generation mode; None = there are none
NewerWeights = Callable[[], Callable[[], None] | None]


# Called between two tokens, with whether all rows are finished: rows that join; then none = no more will come
Arrivals = Callable[[bool], Sequence[Row]]


def no_newer_weights() -> None:
    """The weights stay as they are."""


def no_arrivals(idle: bool) -> Sequence[Any]:
    """No other rows join."""
    return ()


class CachedDecoder(Protocol):
    """Rows that grow, numbered 0 … B-1, with their keys and values kept; see `runner.model.kv_cache`."""

    admits_any_time: ClassVar[bool]  # whether rows may join while others live
    experts: list[Tensor]  # of the tokens of the last admit or step, for each of its rows; empty if not recorded

    def expect(self, prompts: Sequence[tuple[int, ...]]) -> None: ...  # that will join later, in this order

    def admit(self, prompts: Sequence[tuple[int, ...]], slots: Sequence[int]) -> Tensor: ...  # the first logits [n, V]

    def step(self, tokens: Sequence[int]) -> Tensor: ...  # one id per live row → the next logits [B, V]

    def evict(self, gone: Sequence[int]) -> list[int]: ...  # the old numbers of the rows 0, 1, … that remain

    def recompute_prompts(self) -> None: ...  # those that have not joined yet, as the weights have changed


class BatchDecoder(Protocol):
    """Continues many prompts at once.

    length_limit: most tokens of prompt and answer together, and why; None = no limit
    """

    stop_token_ids: frozenset[int]
    vocab_size: int
    length_limit: tuple[int, str] | None

    generation_mode: Callable[[], AbstractContextManager[Any]]  # in which the model generates, under no_grad

    def decode(
        self,
        rows: Sequence[Row],
        choose: ChooseTokens[Row],
        max_rows: int,
        newer: NewerWeights = no_newer_weights,
        record: RecordExperts[Row] | None = None,
        arrivals: Arrivals[Row] = no_arrivals,
    ) -> None: ...

    def make_decoder(self, rows: int) -> CachedDecoder: ...  # of at most so many rows, used in generation_mode

    # The logits [n, V] after each of these ids, from the one at the yielded index on, `chunk` ids at a time
    def prompt_logits(self, ids: Sequence[int], chunk: int) -> Iterator[tuple[int, Tensor]]: ...


class ScoringModel(Protocol):
    """All that is needed to score a batch."""

    @property
    def is_padded(self) -> bool: ...  # whether every row takes as many places as the longest

    def outputs(self, batch: Batch, needs: frozenset[str]) -> dict[str, Tensor]: ...  # name → [T] or [N]


class TrainableModel(ScoringModel, Protocol):
    """A transformers model, with an adapter around it or without, and its tokenizer.

    module        what is saved, and whose parameters are trained: `inner`, or the peft model around it
    inner         the transformers model. Its attributes differ from one architecture to the next: hence no type
    whole         the module around all, which FSDP shards and every pass goes through (`runner.model.parameters`)
    seed          of its initial weights, adapters included
    stage         which of its layers this rank has
    length_limit  most tokens of a row, and why; None = no limit
    """

    module: nn.Module
    inner: Any
    whole: Any
    tokenizer: Any
    seed: int
    device: torch.device
    stage: PipelineStage
    length_limit: tuple[int, str] | None
    config: Any  # the section `model` of the job
    layout: str  # packed or padded
    default_attention: str  # what the transformers model attends with by itself
    flops: Any  # runner.model.flops.ModelFlops
    merges: bool  # whether `save` writes the adapter merged into its base
    routing: ExpertRouting | None  # the routers of its experts, after `hook_routers`; None = it has none, or unhooked
    media: Any  # what reads the images of its inputs: runner.model.media.MediaInputs; None for a model of text alone
    weights_source: Any  # where its first weights come from: runner.model.initial_weights.WeightsSource

    @property  # what must be equal for a checkpoint to fit, beside its parameters
    def base_fingerprint(self) -> dict[str, str]: ...

    @property
    def compute_dtype(self) -> torch.dtype: ...  # of matrix products

    # --- training ---

    def linear_loss(
        self, batch: Batch, coefficients: Tensor, terms: LogitTermsFn | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]: ...

    def trainable(self) -> dict[str, nn.Parameter]: ...

    def train(self) -> None: ...

    def eval(self) -> None: ...

    def dropout_rate(self) -> float: ...  # the largest of model and adapter

    def disable_dropout(self) -> float: ...  # switches it off for good and returns what it was

    def compile(self, decide: Decide) -> None: ...

    # --- how it is built ---

    def hook_routers(self) -> str | None: ...  # see `routing`; returns why not, where its routers do not fit

    def freeze_parts(self, decide: Decide) -> set[str]: ...  # by model.freeze; the names of modules of frozen parts

    def with_peft_module(self, module: nn.Module, *, decide: Decide) -> Self: ...  # the same model inside a peft model

    def merge_adapter(self, *, decide: Decide) -> Self: ...  # the same model with its adapter in its weights

    def set_varlen_kernel(self, kernel: VarlenAttention, *, decide: Decide) -> None: ...

    def replace_dense_attention(self, exchange: Callable[[Any], None]) -> None: ...

    def merge_on_save(self) -> None: ...  # lets `save` write the adapter merged into its base

    # --- parallelism ---

    def transformer_blocks(self) -> list[nn.Module]: ...  # this rank's layers, first to last

    def float32_modules(self) -> list[nn.Module]: ...  # which compute in float32 where compute_dtype is another

    def embedding_and_head(self) -> list[Any]: ...  # embedding and LM head, where some rows of them serve some ids

    def summon_full_params(self) -> AbstractContextManager[None]: ...  # with all parameters on this rank

    def enable_context_parallel(self, group: Any, style: ContextParallelStyle) -> None: ...

    def export_probe(self) -> dict[str, Any]: ...  # what was found out by computing, in plain values …

    def import_probe(self, probe: Mapping[str, Any]) -> None: ...  # … for the same model without weights

    def probe_hidden(self) -> Tensor: ...  # hidden states [T, H] of a handful of tokens

    def matches_probe(self, wanted: Tensor) -> bool: ...  # whether `probe_hidden` still gives the same

    # --- scoring ---

    def adapter_disabled(self) -> AbstractContextManager[Any]: ...  # the base alone; nothing to do without an adapter

    # --- several adapters over one base, by their names in the peft model ---

    def adapter_active(self, name: str) -> AbstractContextManager[None]: ...  # this one computes and is trainable

    def add_adapter(self, name: str, settings: Any) -> None: ...

    def remove_adapter(self, name: str) -> None: ...

    # --- what leaves it ---

    def save(self, folder: Path | None) -> None: ...

    def hf_tensors(
        self, subset: WeightSubset, *, keep: bool = True, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]: ...

    def hf_tensor_bytes(self, subset: WeightSubset) -> int: ...

    def save_configs(self, folder: Path) -> None: ...


class GenerativeModel(TrainableModel, Protocol):
    """A model that continues text."""

    def lm_head(self) -> Callable[[Tensor], Tensor]: ...  # hidden states [S, H] → logits [S, V]

    def batch_decoder(self, *, decide: Decide, merge: bool = True) -> BatchDecoder: ...

    def limits(self) -> ModelLimits: ...


def as_generative(model: TrainableModel) -> GenerativeModel | None:
    """The same model, if it continues text; None for one that gives a number to a text."""
    return cast(GenerativeModel, model) if hasattr(type(model), "batch_decoder") else None
