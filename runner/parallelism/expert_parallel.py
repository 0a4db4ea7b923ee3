"""Expert parallel: experts are distributed over devices, and tokens are sent to them.

Lepikhin et al., 2006.16668, section 3, without the limit on an expert's tokens: none is dropped or padded.

    tokens, their experts ──by expert──▶ rows ──all-to-all──▶ rows of own experts ──the layer's own forward──▶ rows
                                     tokens ◀──weighed, added── rows ◀──all-to-all──────────────────────────────┘

Each rank has some consecutive experts of every layer and all other modules, including routers. The experts' own forward
(of transformers or of the device) is used: it gets a layer with fewer experts, and rows with one expert each. A rank
without rows also runs it, because all ranks must make the same forward and backward passes.

Legend: n tokens, k experts of each, E experts, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from runner.distributed.autograd_collectives import all_to_all, all_to_all_autograd
from runner.interfaces import Decide, TrainableModel
from runner.parallelism.mesh import parallelism_error
from runner.parallelism.tensor_parallel import LocalParameterHooks, TensorParallelGroup, distribute_parameters


def expert_layers(module: nn.Module) -> list[Any]:
    """The experts of each layer, as marked by transformers."""
    return [part for part in module.modules() if hasattr(part, "_is_expert_parallel")]


def apply_expert_parallel(model: TrainableModel, mesh: DeviceMesh, *, alone: bool, decide: Decide) -> None:
    """Replace every layer's experts, on the meta device (see `weight_scatter`), by those of this rank.

    mesh: of one dimension; alone: whether nothing else is sharded, so that all other parameters become replicas on the
    same mesh (an optimizer needs tensors of one kind). The model's parameters are other objects afterwards. Raises
    SpecError, on all ranks, for a model without experts or with unsupported ones.
    """
    found = expert_layers(model.inner)
    if not found:
        text = f"{type(model.inner).__name__} has no experts whose forward transformers can replace"
        raise parallelism_error("ep", text)
    _refuse_uneven_experts(model.whole, found, mesh.size(), alone)
    slices = TensorParallelGroup(mesh)
    used = [part for part in model.whole.modules() if part._parameters] if alone else found
    for part in used:
        # otherwise it already has hooks
        if not any(isinstance(parameter, DTensor) for parameter in part._parameters.values()):
            LocalParameterHooks(part, slices)
    distribute_parameters(used, slices, {id(parameter): 0 for part in found for parameter in part.parameters()})
    for part in found:
        part.forward = TokenDispatcher(part, slices)
    model.whole.join_context = partial(_with_all_experts, model.whole.join_context, slices, model.whole)
    text = f"{found[0].num_experts // mesh.size()} of {found[0].num_experts} experts of {len(found)} layers per rank"
    decide.record_fact("parallelism.ep", text, f"all-to-all of tokens between {mesh.size()} ranks")


def _refuse_uneven_experts(module: nn.Module, found: Sequence[Any], size: int, alone: bool) -> None:
    """Raise SpecError for experts that are not rows of a parameter, or that ranks do not divide."""
    for part in found:
        name = type(part).__name__
        if odd := [key for key, p in part.named_parameters() if "." in key or len(p) != part.num_experts]:
            raise parallelism_error("ep", f"{name}.{odd[0]} does not have one row per expert")
        if part.num_experts % size:
            raise parallelism_error("ep", f"{size} ranks do not divide the {part.num_experts} experts of {name}")
    refuse_adapters(module)
    for part in module.modules():
        if alone and isinstance(part, nn.ParameterDict | nn.ParameterList) and part._parameters:
            raise parallelism_error("ep", f"{type(part).__name__} has parameters that other modules use")


def refuse_adapters(module: nn.Module) -> None:
    """Raise SpecError for a model with adapters on its experts."""
    if any(isinstance(part, ParamWrapper) for part in module.modules()):
        text = "expert parallelism does not support adapters on weights outside linear layers (experts, routers)"
        raise parallelism_error("ep", text, "adapter.targets=[q_proj,k_proj,v_proj,o_proj]")


@contextmanager
def _with_all_experts(
    outer: Callable[[], AbstractContextManager[None]], slices: TensorParallelGroup, module: nn.Module
) -> Iterator[None]:
    """All experts on every rank inside the block, in addition to `outer`."""
    with outer(), slices.summon_full_params(module):
        yield


class TokenDispatcher:
    """Replaces the forward of a layer's experts, of which this rank has some."""

    def __init__(self, part: Any, slices: TensorParallelGroup) -> None:
        self._part, self._slices = part, slices
        self._local_forward: Callable[..., Tensor] = part.forward
        self._experts: int = part.num_experts

    def __call__(self, *given: Tensor, **named: Tensor) -> Tensor:
        """Σ over the chosen experts of weight · expert(hidden), [n, H].

        hidden [n, H], chosen int64 [n, k], weights [n, k], in this order; n may differ between the ranks, and be 0.
        """
        hidden, chosen, weights = (*given, *named.values())
        if self._slices.is_whole:
            return self._local_forward(hidden, chosen, weights)
        of_expert, order = torch.sort(chosen.flatten(), stable=True)
        there, here, experts = self._exchange_counts(of_expert)
        # repeated and then permuted, so that the gradient of the permutation adds nothing up in an order of its own
        rows = hidden[:, None].expand(-1, chosen.shape[1], -1).flatten(0, 1).index_select(0, order)
        rows = all_to_all_autograd(rows, self._group, there, here)
        made = all_to_all_autograd(self._run_local_experts(rows, experts, weights), self._group, here, there)
        made = made.index_select(0, torch.argsort(order)).unflatten(0, chosen.shape)
        return (made * weights[..., None]).sum(1).to(hidden.dtype)

    def _exchange_counts(self, of_expert: Tensor) -> tuple[list[int], list[int], Tensor]:
        """Number of rows to each rank and from each, and the local expert of every row that arrives.

        of_expert: the experts of this rank's rows, in order
        """
        every = torch.arange(self._experts + 1, device=of_expert.device)
        counts = torch.searchsorted(of_expert, every).diff()
        met = all_to_all(counts, self._group)
        size = self._slices.size
        there, here = torch.stack([counts, met]).view(2, size, -1).sum(2).tolist()
        own = every[: self._experts // size].repeat(size)
        return there, here, own.repeat_interleave(met, output_size=sum(here))

    def _run_local_experts(self, rows: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """The outputs of this rank's experts for rows [R, H]; experts [R]: the local expert of each row."""
        part = self._part
        if not len(rows):  # differentiable, because the other ranks wait for a gradient
            return rows + sum(p[:0].sum() for p in part._parameters.values() if p is not None and p.requires_grad)
        part.num_experts = self._experts // self._slices.size
        try:
            return self._local_forward(rows, experts[:, None], weights.new_ones(len(rows), 1))
        finally:
            part.num_experts = self._experts

    @property
    def _group(self) -> Any:
        return self._slices.mesh.get_group()
