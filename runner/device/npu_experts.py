"""The experts of an MoE layer by the grouped matrix product of Ascend NPUs, `npu_grouped_matmul`.

    [S, H] by expert ──grouped──▶ gate, up [S, 2·I] ──swiglu──▶ [S, I] ──grouped──▶ [S, H] ──weighted, summed──▶ [T, H]

Legend: T tokens, k experts of each, S = T·k, E experts, H hidden size, I size inside an expert. The operator has no
gradient of its own: both gradients are grouped products again, one grouped along the rows and one along the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

GroupedMatmul = Callable[..., Sequence[Tensor]]  # as torch_npu.npu_grouped_matmul
ROWS, SUM = 0, 2  # the axis that is grouped: m, or k of [m, k] x [k, n]


class _GroupedMatmulFunction(torch.autograd.Function):
    """x [S, K] times weight [E, K, N] of each row's group → [S, N]; `ends` int64 [E] ends the groups."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, operator: GroupedMatmul) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        ctx.operator = operator
        return _grouped_product(operator, x, weight, ends, ROWS)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight, ends = ctx.saved_tensors
        grad = grads[0].contiguous()
        of_x, of_weight, *_ = ctx.needs_input_grad
        return (
            _grouped_product(ctx.operator, grad, weight.transpose(1, 2), ends, ROWS) if of_x else None,
            _grouped_product(ctx.operator, x.t(), grad, ends, SUM) if of_weight else None,
            None,
            None,
        )


def _grouped_product(operator: GroupedMatmul, x: Tensor, weight: Tensor, ends: Tensor, axis: int) -> Tensor:
    # split_item 3: one tensor comes back; group_list_type 0: the list is cumulative
    return operator([x], [weight], group_list=ends, split_item=3, group_type=axis, group_list_type=0)[0]


def grouped_experts_forward(
    experts: nn.Module,
    hidden: Tensor,
    chosen: Tensor,
    weights: Tensor,
    *,
    grouped_matmul: GroupedMatmul,
    swiglu: Callable[[Tensor], Tensor],
) -> Tensor:
    """Σ over the chosen experts of weight · expert(hidden), [T, H].

    hidden [T, H]; chosen int64 [T, k]; weights [T, k]. `experts` holds gate_up_proj [E, 2·I, H], the gates first, and
    down_proj [E, H, I]. Nothing waits for the device.
    """
    tokens, choices = chosen.shape
    gate_up: Any = experts.gate_up_proj
    down: Any = experts.down_proj
    dtype: torch.dtype = down.dtype
    of_expert, order = torch.sort(chosen.flatten(), stable=True)
    every = torch.arange(experts.num_experts, device=hidden.device)  # type: ignore[call-overload]
    ends = torch.searchsorted(of_expert, every, right=True)
    # repeated and then permuted, so that the gradient of the permutation adds nothing up in an order of its own
    rows = hidden.to(dtype)[:, None].expand(-1, choices, -1).flatten(0, 1).index_select(0, order)
    inner = swiglu(_grouped_linear(rows, gate_up, ends, dtype, grouped_matmul))
    out = _grouped_linear(inner, down, ends, dtype, grouped_matmul)
    out = out * weights.flatten().index_select(0, order)[:, None]
    return out.index_select(0, torch.argsort(order)).unflatten(0, (tokens, choices)).sum(1).to(hidden.dtype)


def _grouped_linear(x: Tensor, weight: Any, ends: Tensor, dtype: torch.dtype, operator: GroupedMatmul) -> Tensor:
    out: Tensor = _GroupedMatmulFunction.apply(x, weight.to(dtype).transpose(1, 2), ends, operator)
    return out
