"""Pipeline parallel: each stage has some layers of the model, and micro-batches pass through stages.

    stage 0   ids ──embedding──▶ layers 0 … k ──hidden──▶
    stage 1                                    ──hidden──▶ layers k+1 … n ──norm, heads──▶ loss
                                               ◀─gradient─

A stage has the whole module structure with all parameter names. Parameters of other stages stay on `meta`. Instead of
running the layers before its own, a stage receives hidden states; after its own layers it sends them, and its forward
pass ends:

    layers of the model      0   1   2   3   4   5
    forward pass of a stage  ·  recv 2   3  send

Transfers are autograd operations: the backward pass of a sent tensor waits for its gradient. Sending returns an empty
tensor, from which this rank's backward pass starts. So a schedule is only an order of passes. Stages make the passes of
their micro-batches, forward F and backward B, in one of these orders:

    one stage                F0 B0 F1 B1 F2 B2 …
    1F1B, stage 0 of 2       F0 F1 B0 F2 B1 …            (Narayanan et al., 2104.04473, section 2.2.1)
    interleaved, 2 chunks    F0 F1 F0' F1' F2 B0' …      (section 2.2.2)

Micro-batches take turns in groups of as many as there are stages; the last group may be smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, distributed, nn

from runner.core.errors import RunnerError
from runner.distributed import dtensor_utils
from runner.interfaces import TrainableModel
from runner.interfaces.learning import PipelineOp
from runner.parallelism.mesh import parallelism_error
from runner.parallelism.process_groups import StageLink, StageLinks
from runner.parallelism.weight_scatter import TensorSlot, tensor_slots


class RecvForward(torch.autograd.Function):
    """Receives hidden states from the previous stage, and sends their gradient back."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, border: StageLink, blank: Tensor) -> Tensor:
        ctx.border = border
        return border.hidden.receive(blank.shape, blank.dtype, blank.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ctx.border.gradients.send(grad)
        return None, None, None


class SendForward(torch.autograd.Function):
    """Sends hidden states to the next stage, and receives their gradient; returns an empty tensor [0]."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, border: StageLink, hidden: Tensor) -> Tensor:
        ctx.border, ctx.like = border, (hidden.shape, hidden.dtype, hidden.device)
        border.hidden.send(hidden)
        return hidden.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:
        return None, None, ctx.border.gradients.receive(*ctx.like)


class EndOfStage(Exception):
    """Leaves a forward pass after the stage's last layer; `token` starts the backward pass."""

    def __init__(self, token: Tensor) -> None:
        super().__init__()
        self.token = token


class AbsentLayer:
    """Replaces a layer of another stage, or of a virtual stage that does not run now."""

    def __init__(self, layer: nn.Module, work: Callable[[Tensor], Tensor]) -> None:
        self._layer, self._work = layer, work

    def __call__(self, *inputs: Any, **keywords: Any) -> Tensor:
        """Process the hidden states, the first argument or a keyword."""
        return self._work(inputs[0] if inputs else keywords["hidden_states"])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


class StageLayers(nn.ModuleList):
    """The layers of a model; iterating gives those of this stage, and `AbsentLayer` for the others."""

    def __init__(self, layers: Sequence[nn.Module], stage: StagedModel) -> None:
        super().__init__(layers)
        self._stage = stage

    def __iter__(self) -> Iterator[Any]:
        return iter(self._visible_layers())

    def __getitem__(self, index: Any) -> Any:
        return self._visible_layers()[index] if isinstance(index, slice) else super().__getitem__(index)

    def _visible_layers(self) -> list[Any]:
        layers = [layer for layer in self._modules.values() if layer is not None]
        return self._stage.visible_layers(layers) if self._stage.passing else layers


Forward = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class StageOwner:
    """The stage of `group` that has a tensor; device: where other stages receive it."""

    group: Any
    stage: int
    device: torch.device

    def broadcast_full(self, tensor: Tensor, make_full: Callable[[], Tensor]) -> Tensor:
        """See `runner.distributed.dtensor_utils.TensorOwner`. Collective."""
        if distributed.get_rank(self.group) == self.stage:
            full = make_full().to(self.device).contiguous()  # shards may be in host memory
        else:
            full = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        distributed.broadcast(full, group=self.group, group_src=self.stage)
        return full


class StagedModel:
    """This rank's stage of a model: see `runner.interfaces.PipelineStage`.

    is_whole: while every rank has the full model; passing: while a forward pass runs in this stage
    """

    def __init__(
        self, model: TrainableModel, borders: StageLinks, group: Any, chunks: int, device: torch.device
    ) -> None:
        """model: on `meta`; parameters of other stages stay there. group: the stages."""
        self.num_stages, self.rank = distributed.get_world_size(group), distributed.get_rank(group)
        self.is_whole = self.passing = False
        self._group, self._chunks, self._borders, self._device = group, chunks, borders, device
        self._chunk = 0
        parent, name, layers = _find_layers(model)
        self._runs = split_layers(len(layers), self.num_stages * chunks)
        stage_of_layer = [at % self.num_stages for at, run in enumerate(self._runs) for _ in run]
        homes = {id(layer): stage for layer, stage in zip(layers, stage_of_layer, strict=True)}
        parent._modules[name] = StageLayers(layers, self)
        self._width: int = model.inner.config.get_text_config().hidden_size
        self._dtype = model.compute_dtype
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        self._tensors = self._stages_of_parameters(model, homes)
        absent = {slot.tensor for holders, places in self._tensors if self.rank not in holders for slot in places}
        away = {layer for layer in layers if homes[id(layer)] != self.rank}
        self.absent_modules: frozenset[Any] = frozenset(absent | away)

    def _stages_of_parameters(
        self, model: TrainableModel, homes: dict[int, int]
    ) -> list[tuple[tuple[int, ...], list[TensorSlot]]]:
        """For each parameter, the stages that have it, in order, and its slots in the module."""
        of = {id(p): homes[id(layer)] for layer in model.transformer_blocks() for p in layer.parameters()}
        embedding = {id(p) for p in model.inner.get_input_embeddings().parameters()}
        head = model.inner.get_output_embeddings()
        shared = embedding & {id(p) for p in ([] if head is None else head.parameters())}
        found: dict[int, list[TensorSlot]] = {}
        for _, slot in tensor_slots(model.whole):
            if isinstance(slot.tensor, nn.Parameter):
                found.setdefault(id(slot.tensor), []).append(slot)
        last = self.num_stages - 1
        return [
            ((0, last) if key in shared else (of.get(key, 0 if key in embedding else last),), places)
            for key, places in found.items()
        ]

    @property
    def index(self) -> int:
        """See `Stage`."""
        return self._chunk * self.num_stages + self.rank

    @property
    def is_last(self) -> bool:
        """See `Stage`."""
        return self.is_whole or self.index == len(self._runs) - 1

    def schedule(self, count: int) -> Sequence[PipelineOp]:
        """See `Stage`."""
        return one_f_one_b(self.rank, self.num_stages, self._chunks, count)

    def forward_schedule(self, count: int) -> Sequence[PipelineOp]:
        """See `Stage`."""
        return forward_schedule(self.num_stages, self._chunks, count)

    def begin_op(self, op: PipelineOp) -> None:
        """See `Stage`."""
        self._chunk = op.chunk

    def run_local(self, run: Callable[[Forward], Tensor], forward: Forward) -> Tensor:
        """See `Stage`: an empty tensor where hidden states were sent to the next stage."""
        if self.is_whole:
            return run(forward)
        self.passing = True
        try:
            return run(partial(self._from_hidden, forward) if self.index else forward)
        except EndOfStage as end:
            return end.token
        finally:
            self.passing = False

    def _from_hidden(self, forward: Forward, input_ids: Tensor, **keywords: Any) -> Any:
        """A forward pass that receives its hidden states; its input has only their shape."""
        nothing = torch.zeros((), dtype=self._dtype, device=self._device)
        return forward(inputs_embeds=nothing.expand(*input_ids.shape, self._width), **keywords)

    def visible_layers(self, layers: Sequence[nn.Module]) -> list[Any]:
        """The layers of this stage, and `AbsentLayer` for the others."""
        own, found = self._runs[self.index], list[Any]()
        for place, layer in enumerate(layers):
            work = {own.start - 1: self._receive, own.stop: self._send}.get(place, lambda hidden: hidden)
            found.append(layer if place in own else AbsentLayer(layer, work))
        return found

    def _receive(self, blank: Tensor) -> Tensor:
        return RecvForward.apply(self._anchor, self._borders.before, blank)

    def _send(self, hidden: Tensor) -> Tensor:
        if hidden.dtype != self._dtype or hidden.shape[-1] != self._width:
            between = f"{hidden.dtype} [… {hidden.shape[-1]}] between layers"
            raise RunnerError(
                f"hidden states are {between}, but {self._dtype} [… {self._width}] before them: "
                "pipeline parallelism does not support such a model; type parallelism.pp=1"
            )
        raise EndOfStage(SendForward.apply(self._anchor, self._borders.after, hidden))

    def tied_parameters(self) -> list[Tensor]:
        """Parameters that the first and the last stage share, if this is one of them."""
        return [places[0].tensor for holders, places in self._tensors if len(holders) > 1 and self.rank in holders]

    def on_parameters_ready(self) -> None:
        """Set the owner of each parameter for `full_tensor`: from now on these objects have values."""
        for holders, places in self._tensors:
            dtensor_utils.set_owner(places[0].tensor, StageOwner(self._group, holders[0], self._device))

    @contextmanager
    def summon_full_params(self, inside: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        """The whole model on every rank inside the block. Collective on entering.

        inside: gathers this stage's parameters, if they are sharded
        """
        kept: list[tuple[TensorSlot, Tensor]] = []
        with inside():
            self.is_whole = True
            try:
                for (first, *_), places in self._tensors:
                    kept += self._put_full_tensor(first, places)
                yield
            finally:
                self.is_whole = False
                for slot, tensor in kept:
                    slot.assign(tensor)

    def _put_full_tensor(self, home: int, places: list[TensorSlot]) -> list[tuple[TensorSlot, Tensor]]:
        """Assign the full tensor of another stage; returns the previous tensors."""
        own = places[0].tensor
        full = StageOwner(self._group, home, self._device).broadcast_full(own, own.detach)
        if home == self.rank:
            return []
        kept = [(slot, slot.tensor) for slot in places]
        made = nn.Parameter(full, requires_grad=own.requires_grad)
        for slot in places:
            slot.assign(made)
        return kept


def split_layers(layers: int, count: int) -> list[range]:
    """`count` ranges of layers whose lengths differ by at most one, longer ones first."""
    sizes = [layers // count + (at < layers % count) for at in range(count)]
    return [range(first, end) for first, end in pairwise(accumulate(sizes, initial=0))]


def _find_layers(model: TrainableModel) -> tuple[nn.Module, str, list[nn.Module]]:
    """The module, attribute name and layers of the model's layer list.

    Raises SpecError if there is not exactly one, or more than an embedding before it.
    """
    blocks, kind = model.transformer_blocks(), type(model.inner).__name__
    embedding = set(model.inner.get_input_embeddings().modules())
    for part in model.inner.modules():
        before: list[str] = []
        for name, child in part.named_children():
            if isinstance(child, nn.ModuleList) and blocks and list(child) == blocks:
                if before:
                    text = f"{kind} has {before[0]} before its layers, in addition to the embedding"
                    raise parallelism_error("pp", text)
                return part, name, blocks
            if child not in embedding and any(True for _ in child.parameters()):
                before.append(name)
    raise parallelism_error("pp", f"{kind} does not have its layers in one ModuleList")


def apply_pipeline_parallel(
    model: TrainableModel, borders: StageLinks, group: Any, *, chunks: int, device: torch.device
) -> None:
    """Turn `model`, on the meta device (see `weight_scatter`), into this rank's stage.

    `apply.refuse_changed_model` follows when the weights are loaded. Raises SpecError, on all ranks, for a model
    without a list of layers.
    """
    model.stage = stage = StagedModel(model, borders, group, chunks, device)
    model.whole.join_context = partial(stage.summon_full_params, model.whole.join_context)


def one_f_one_b(rank: int, stages: int, chunks: int, count: int) -> list[PipelineOp]:
    """The passes of stage `rank` for `count` micro-batches: 1F1B, interleaved with several chunks.

    At most `num_warmup_forwards` forward passes wait for their backward pass at any time. With several chunks, the
    paper needs a count that is a multiple of the stages: here the order is that of the next multiple, without the
    additional passes.
    """
    filled = count if chunks == 1 else -(-count // stages) * stages
    forward = forward_schedule(stages, chunks, filled)
    backward = [PipelineOp(micro, chunks - 1 - chunk, backward=True) for micro, chunk, _ in forward]
    ahead = min(num_warmup_forwards(rank, stages, chunks), len(forward))
    turns = forward[:ahead]
    for at, one in enumerate(backward):
        turns += [one, *forward[ahead + at : ahead + at + 1]]
    return [turn for turn in turns if turn.micro < count]


def num_warmup_forwards(rank: int, stages: int, chunks: int) -> int:
    """Maximum number of forward passes of stage `rank` before its first backward pass."""
    return stages - rank if chunks == 1 else 2 * (stages - rank - 1) + (chunks - 1) * stages + 1


def forward_schedule(stages: int, chunks: int, count: int) -> list[PipelineOp]:
    """The forward passes alone, in the order of `one_f_one_b`, and the same on each stage."""
    groups = [range(first, min(first + stages, count)) for first in range(0, count, stages)]
    return [PipelineOp(micro, chunk) for group in groups for chunk in range(chunks) for micro in group]
