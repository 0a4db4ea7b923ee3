"""Tensor parallel: the matrices of layers are sharded (Shoeybi et al., 1909.08053, section 3).

    hidden ──▶ q k v, gate up: some heads, some features of each rank ──▶ o, down ──summed over ranks──▶ hidden
    ids    ──▶ embedding: the rows of some ids ──summed──▶ hidden ──▶ LM head: their logits
    (runner.model.chunked_lm_head)

    replicated ──copy_to_region──▶ sharded ──reduce_from_region──▶ replicated
    copy_to_region: identity, gradients are summed;  reduce_from_region: sum, gradients unchanged

Parameters are DTensors: shards, or replicas. In its forward pass each module gets this rank's plain local tensor, so
its own code computes as always, with whatever operators the device has installed.

All other modules (norms, routers, experts, heads with one output) are replicated and compute the same on every rank.
Low-rank adapters are sharded with their layers: with sharded outputs, B is sharded; with sharded inputs, A is, and the
adapter's output is summed with the layer's. The other matrix is replicated, and each rank computes a part of its
gradient, like that of the norms between q and the heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from runner.distributed import dtensor_utils
from runner.distributed.autograd_collectives import all_reduce
from runner.interfaces import Decide, TrainableModel
from runner.parallelism.mesh import parallelism_error

SlicePlan = dict[int, int]  # id of a parameter → its sharded dimension


class _CopyToRegion(torch.autograd.Function):
    """Identity, whose gradient is summed over ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(grad, group=ctx.group)
        return grad, None


@dataclass(slots=True)
class TensorParallelGroup:
    """The tensor-parallel ranks of one model.

    partial_gradients: replicated parameters (module, name) of which each rank computes a part of the gradient;
    rank0_only: replicated parameters that only rank 0 adds, because they are added before the sum over ranks
    """

    mesh: DeviceMesh
    is_whole: bool = False  # while every rank has the full model
    partial_gradients: set[tuple[nn.Module, str]] = field(default_factory=set)
    rank0_only: set[tuple[nn.Module, str]] = field(default_factory=set)

    @property
    def rank(self) -> int:
        """The tensor-parallel rank."""
        return self.mesh.get_local_rank()

    @property
    def size(self) -> int:
        """The number of tensor-parallel ranks."""
        return self.mesh.size()

    def copy_to_region(self, tensor: Tensor) -> Tensor:
        """Pass a replicated tensor to sharded layers."""
        return tensor if self.is_whole else _CopyToRegion.apply(tensor, self.mesh.get_group())

    def reduce_from_region(self, tensor: Tensor) -> Tensor:
        """Sum the outputs of sharded layers over ranks."""
        return tensor if self.is_whole else all_reduce(tensor, self.mesh.get_group())

    def parameter_for_forward(self, part: nn.Module, name: str, parameter: DTensor) -> Tensor:
        """The plain local tensor of a parameter for a forward pass; differentiable."""
        held: Tensor = parameter.to_local()
        if (part, name) in self.rank0_only and self.rank:
            held = held - held.detach()  # zero, with the gradient of the parameter
        return self.copy_to_region(held) if (part, name) in self.partial_gradients else held

    @contextmanager
    def summon_full_params(self, module: nn.Module) -> Iterator[None]:
        """Full, plain parameters inside the block. Collective on entering."""
        kept: list[tuple[dict[str, Any], str, DTensor]] = []
        made: dict[int, nn.Parameter] = {}
        for part in module.modules():
            parameters: dict[str, Any] = part._parameters
            for name, parameter in parameters.items():
                if isinstance(parameter, DTensor) and not parameter.is_meta:
                    if id(parameter) not in made:  # tied parameters stay tied
                        full = dtensor_utils.full_tensor_of_holders(parameter)
                        made[id(parameter)] = nn.Parameter(full, requires_grad=parameter.requires_grad)
                    kept.append((parameters, name, parameter))
        self.is_whole = True
        try:
            for parameters, name, parameter in kept:
                parameters[name] = made[id(parameter)]
            yield
        finally:
            self.is_whole = False
            for parameters, name, parameter in kept:
                parameters[name] = parameter


def distribute_parameters(parts: Iterable[nn.Module], slices: TensorParallelGroup, plan: SlicePlan) -> None:
    """Replace every parameter of these modules, on meta, by a DTensor: a shard or a replica."""
    made: dict[int, nn.Parameter] = {}
    for part in parts:
        for name, parameter in part._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    made[id(parameter)] = _slice_parameter(parameter, plan.get(id(parameter)), slices)
                part._parameters[name] = made[id(parameter)]


def _slice_parameter(full: nn.Parameter, dim: int | None, slices: TensorParallelGroup) -> nn.Parameter:
    held, placement = dtensor_utils.local_tensor(full), Replicate() if dim is None else Shard(dim)
    if dim is not None:
        held = held.chunk(slices.size, dim)[slices.rank].clone(memory_format=torch.contiguous_format)
    options: dict[str, Any] = {"run_check": False, "shape": full.shape, "stride": full.stride()}
    made = DTensor.from_local(held, slices.mesh, [placement], **options)
    return nn.Parameter(made, requires_grad=full.requires_grad)


class LocalParameterHooks:
    """Hooks that give a module plain local tensors during its forward pass."""

    def __init__(self, part: nn.Module, slices: TensorParallelGroup) -> None:
        self._part, self._slices = part, slices
        self._kept: dict[str, DTensor] = {}
        part.register_forward_pre_hook(self._before)
        part.register_forward_hook(self._after, always_call=True)

    def _before(self, *_: Any) -> None:
        parameters: dict[str, Any] = self._part._parameters
        self._kept = {name: p for name, p in parameters.items() if isinstance(p, DTensor)}
        for name, parameter in self._kept.items():
            parameters[name] = self._slices.parameter_for_forward(self._part, name, parameter)

    def _after(self, *_: Any) -> None:
        parameters: dict[str, Any] = self._part._parameters
        parameters.update(self._kept)
        self._kept = {}


class VocabEmbeddingHooks(LocalParameterHooks):
    """Hooks of a vocabulary-parallel embedding: the sum over ranks has the rows of all ids."""

    def __init__(self, part: nn.Embedding, slices: TensorParallelGroup) -> None:
        self._padding = part.padding_idx
        self._others: Tensor | None = None  # mask of ids whose rows are on other ranks
        super().__init__(part, slices)

    def _before(self, part: Any, inputs: tuple[Any, ...]) -> Any:
        super()._before()
        if not self._kept:
            return None
        weight = self._kept["weight"]
        rows = dtensor_utils.local_slice(weight)[0]
        [ids] = inputs
        self._others = (ids < rows.start) | (ids >= rows.stop)
        if self._padding is not None:
            part.padding_idx = self._padding - rows.start if rows.start <= self._padding < rows.stop else None
        return ((ids - rows.start).masked_fill(self._others, 0),)

    def _after(self, part: Any, inputs: tuple[Any, ...], output: Tensor) -> Any:
        super()._after()
        part.padding_idx = self._padding
        others, self._others = self._others, None
        if others is None or output is None:
            return None
        return self._slices.reduce_from_region(output.masked_fill(others[..., None], 0))


OUTPUTS, INPUTS = 0, 1  # the dimensions of a linear layer's weight
LAYER_PLANS = (
    {"q_proj": OUTPUTS, "k_proj": OUTPUTS, "v_proj": OUTPUTS, "o_proj": INPUTS},
    {"gate_proj": OUTPUTS, "up_proj": OUTPUTS, "down_proj": INPUTS},
)


def apply_tensor_parallel(model: TrainableModel, mesh: DeviceMesh, *, decide: Decide) -> None:
    """Replace every parameter of `model`, on the meta device, by this rank's shard or a replica.

    mesh: of one dimension. `apply.refuse_changed_model` follows when the weights are loaded. The model's parameters are
    other objects afterwards. Raises SpecError, on all ranks, for a model without supported layers.
    """
    slices, plan = TensorParallelGroup(mesh), SlicePlan()
    for layer, dims in _sliceable_layers(model.inner):
        _cut_layer(layer, dims, slices, plan)
    ends = _vocab_parallel_ends(model, slices, decide)
    plan |= {id(end._parameters["weight"]): OUTPUTS for end in ends}
    distribute_parameters(model.whole.modules(), slices, plan)
    for part in model.whole.modules():
        if isinstance(part, nn.ParameterDict | nn.ParameterList) and part._parameters:
            raise parallelism_error("tp", f"{type(part).__name__} has parameters that other modules use")
        if part in ends and isinstance(part, nn.Embedding):
            VocabEmbeddingHooks(part, slices)
        elif part not in ends and part._parameters:
            LocalParameterHooks(part, slices)
    model.whole.join_context = partial(slices.summon_full_params, model.whole)


def _sliceable_layers(module: nn.Module) -> Iterator[tuple[nn.Module, dict[str, int]]]:
    """Attention and feed-forward layers, each with the sharded dimensions of its matrices."""
    found = [
        (part, dims) for part in module.modules() for dims in LAYER_PLANS if all(hasattr(part, name) for name in dims)
    ]
    if not found:
        names = ", ".join(LAYER_PLANS[0] | LAYER_PLANS[1])
        raise parallelism_error("tp", f"{type(module).__name__} has no layers named {names}")
    yield from found


def _cut_layer(layer: nn.Module, dims: dict[str, int], slices: TensorParallelGroup, plan: SlicePlan) -> None:
    """Plan the sharding of a layer's weights, and add hooks for its inputs and outputs."""
    for name, dim in dims.items():
        linear = getattr(layer, name)
        for one, cut in _linear_weights(linear, dim):
            if cut is not None:
                plan[id(one._parameters["weight"])] = cut
            if one.bias is not None and cut == OUTPUTS:
                plan[id(one._parameters["bias"])] = 0
            elif one.bias is not None:
                slices.rank0_only.add((one, "bias"))
        if dim == INPUTS:
            linear.register_forward_hook(lambda part, inputs, output: slices.reduce_from_region(output))
    for part in layer.modules():
        own = [name for name, parameter in part._parameters.items() if parameter is not None]
        not_cut = {(part, name) for name in own if id(part._parameters[name]) not in plan}
        slices.partial_gradients |= not_cut - slices.rank0_only
    layer.register_forward_pre_hook(partial(_enter_layer, slices), with_kwargs=True)


def _linear_weights(linear: nn.Module, dim: int) -> Iterator[tuple[Any, int | None]]:
    """The matrices of a linear layer and its adapters, each with its sharded dimension."""
    base = getattr(linear, "base_layer", linear)
    if getattr(type(base), "forward", None) is not nn.Linear.forward:  # another class, or one that casts weights
        raise parallelism_error("tp", f"layers of type {type(base).__name__} are not supported")
    yield base, dim
    if base is not linear:
        adapters: Any = linear
        yield from ((one, None if dim == OUTPUTS else INPUTS) for one in adapters.lora_A.values())
        yield from ((one, OUTPUTS if dim == OUTPUTS else None) for one in adapters.lora_B.values())


def _enter_layer(
    slices: TensorParallelGroup, part: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]
) -> Any:
    """Hidden states are the first argument or a keyword."""
    if inputs:
        return (slices.copy_to_region(inputs[0]), *inputs[1:]), keywords
    return inputs, keywords | {"hidden_states": slices.copy_to_region(keywords["hidden_states"])}


def _vocab_parallel_ends(model: TrainableModel, slices: TensorParallelGroup, decide: Decide) -> set[Any]:
    """Embedding and LM head, if they are sharded by ids."""
    ends = model.embedding_and_head()
    if rows := [len(end.weight) for end in ends if len(end.weight) % slices.size]:
        text = f"{slices.size} ranks do not divide {rows[0]} vocabulary rows"
        decide("parallelism.tp", "sharded embedding and LM head", "replicated on every rank", text)
        return set()
    return set(ends)
