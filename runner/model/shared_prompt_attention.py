"""Attention of rows that continue a shared prompt, whose keys are not repeated (2402.05099).

    own part        every row to itself, causal                          ──▶ output, log-sum-exp ──┐
    prompt's part   rows behind a prompt to all of it, one sequence each ──▶ output, log-sum-exp ──┴─▶ merged

Each part's backward kernel gets the merged output and log-sum-exp, from which it computes its share of the gradients.
The two parts are one operator, which torch.compile does not look into.

Legend: T tokens, B of them in rows that continue a prompt, K in these prompts, P prompts, h heads, d head size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from runner.core import torch_compat
from runner.core.batch import Batch
from runner.core.prefix_tree import continued_prompts
from runner.interfaces import SequenceLengths

aten = torch.ops.aten
INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor ends, Tensor behind, Tensor prompts, Tensor behind_ends, "
    "Tensor prompt_ends, Tensor longest, float scale"
)


class SharedPrompts(NamedTuple):
    """Which rows continue which prompts.

    ends: int32 [N + 1] of all rows; behind: int64 [B], the tokens behind prompts; prompts: int64 [K], their tokens;
    behind_ends, prompt_ends: int32 [P + 1]; longest: int64 [3] on the CPU, of `ends`, `behind_ends`, `prompt_ends`
    """

    ends: Tensor
    behind: Tensor
    prompts: Tensor
    behind_ends: Tensor
    prompt_ends: Tensor
    longest: Tensor

    @classmethod
    def of(cls, batch: Batch) -> SharedPrompts | None:
        """Those of a batch, on its device; None if no row continues another."""
        if (found := continued_prompts(batch)) is None:
            return None
        device, (behind, prompts, *lengths) = batch.tokens["ids"].device, found
        sizes = [SequenceLengths.of(n.tolist(), device) for n in (batch.structure.rows["lengths"], *lengths)]
        index = (one.to(device, non_blocking=True) for one in (behind, prompts))
        ends, *others = (one.cumulative for one in sizes)
        return cls(*(ends, *index, *others, torch.tensor([one.longest for one in sizes])))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Causal attention along each path; see `PackedRows.attend`, without window and dropout."""
        inputs = (one[0].transpose(0, 1) for one in (query, key, value))
        out: Tensor = torch.ops.runner.shared_prompt_attention(*inputs, *self, scale)[0]
        return out[None]


def _attend(query: Tensor, key: Tensor, value: Tensor, *layout: Any) -> tuple[Tensor, Tensor]:
    """[T, h, d] → the output, and its log-sum-exp [h, T]."""
    ends, behind, prompts, behind_ends, prompt_ends, longest, scale = layout
    kernel, longest = (FLASH_KERNELS if query.is_cuda else ROW_KERNELS)[0], longest.tolist()
    out, sums = kernel((query, key, value), (ends, ends), (longest[0], longest[0]), True, scale)
    parts = query[behind], key[prompts], value[prompts]
    more, more_sums = kernel(parts, (behind_ends, prompt_ends), longest[1:], False, scale)
    own_sums = sums[:, behind]
    total = torch.logaddexp(own_sums, more_sums)
    own_share, share = ((one - total).exp().t()[..., None] for one in (own_sums, more_sums))
    out[behind] = (out[behind] * own_share + more * share).to(out.dtype)
    sums[:, behind] = total
    return out, sums


def _backward(
    grad: Tensor, out: Tensor, sums: Tensor, query: Tensor, key: Tensor, value: Tensor, *layout: Any
) -> tuple[Tensor, ...]:
    ends, behind, prompts, behind_ends, prompt_ends, longest, scale = layout
    kernel, longest = (FLASH_KERNELS if query.is_cuda else ROW_KERNELS)[1], longest.tolist()
    whole, index = (grad, query, key, value, out), (behind, behind, prompts, prompts, behind)
    found = kernel(whole, sums, (ends, ends), (longest[0], longest[0]), True, scale)
    parts = [one[at] for one, at in zip(whole, index, strict=True)]
    more = kernel(parts, sums[:, behind], (behind_ends, prompt_ends), longest[1:], False, scale)
    return tuple(one.index_add_(0, at, two) for one, at, two in zip(found, index[1:4], more, strict=True))


def _row_kernel(tensors: Sequence[Tensor], ends: Sequence[Tensor], _: Any, causal: bool, scale: float) -> Any:
    """Query, key and value [·, h, d], sequence by sequence: the output, and the log-sum-exp [h, ·]."""
    kernel, parts = aten._scaled_dot_product_flash_attention_for_cpu, map(_split, tensors, (*ends, ends[1]))
    found = [kernel(*one, 0.0, causal, scale=scale) for one in zip(*parts, strict=True)]
    return _join(out for out, _ in found), torch.cat([sums[0] for _, sums in found], 1)


def _row_kernel_backward(
    tensors: Sequence[Tensor], sums: Tensor, ends: Sequence[Tensor], _: Any, causal: bool, scale: float
) -> tuple[Tensor, ...]:
    """Gradients of query, key and value; tensors: that of the output, query, key, value, output."""
    kernel, (queries, keys) = aten._scaled_dot_product_flash_attention_for_cpu_backward, ends
    parts = map(_split, (*tensors, sums.t()[..., None]), (queries, queries, keys, keys, queries, queries))
    found = [kernel(*one, last[..., 0], 0.0, causal, scale=scale) for *one, last in zip(*parts, strict=True)]
    return tuple(_join(one) for one in zip(*found, strict=True))


def _split(tensor: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
    """[·, h, d] → [1, h, n, d] of each sequence."""
    return tensor.transpose(0, 1)[None].split(ends.diff().tolist(), 2)


def _join(parts: Iterable[Tensor]) -> Tensor:
    return torch.cat([one[0].transpose(0, 1) for one in parts])


def _flash_kernel(
    tensors: Sequence[Tensor], ends: Sequence[Tensor], longest: Sequence[int], causal: bool, scale: float
) -> Any:
    """As `_row_kernel`, in one call, whichever package computes the attention of other batches."""
    return aten._flash_attention_forward(*tensors, *ends, *longest, 0.0, causal, False, scale=scale)[:2]


def _flash_kernel_backward(
    tensors: Sequence[Tensor], sums: Tensor, ends: Sequence[Tensor], longest: Sequence[int], causal: bool, scale: float
) -> Any:
    unused = torch.zeros(2, dtype=torch.uint64, device=sums.device), torch.empty(0, device=sums.device)  # of dropout
    return aten._flash_attention_backward(
        *tensors, sums.contiguous(), *ends, *longest, 0.0, causal, *unused, scale=scale
    )


ROW_KERNELS: tuple[Any, Any] = _row_kernel, _row_kernel_backward
FLASH_KERNELS: tuple[Any, Any] = _flash_kernel, _flash_kernel_backward


def _attend_fake(query: Tensor, key: Tensor, value: Tensor, *layout: Any) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(query.dtype, torch.float32)
    return query.new_empty(query.shape), query.new_empty(query.shape[1], query.shape[0], dtype=wide)


def _backward_fake(grad: Tensor, out: Tensor, sums: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(one.new_empty(one.shape) for one in inputs[:3])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[:-1])
    ctx.scale = inputs[-1]
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
    found = torch.ops.runner.shared_prompt_attention_backward(grad.contiguous(), *ctx.saved_tensors, ctx.scale)
    return (*found, *[None] * 7)


def define_operator(name: str, inputs: str, outputs: str, function: Any, fake: Any) -> None:
    """Define an operator of torch, which torch.compile does not look into."""
    torch.library.define(name, f"({inputs}) -> {outputs}")
    torch.library.impl(name, "CompositeExplicitAutograd", function)
    torch.library.register_fake(name, fake)


OPERATOR = "runner::shared_prompt_attention"
define_operator(OPERATOR, INPUTS, "(Tensor, Tensor)", _attend, _attend_fake)
BACKWARD_INPUTS = f"Tensor grad, Tensor out, Tensor sums, {INPUTS}"
define_operator(f"{OPERATOR}_backward", BACKWARD_INPUTS, "(Tensor, Tensor, Tensor)", _backward, _backward_fake)
torch.library.register_autograd(OPERATOR, _gradients, setup_context=_save)


@cache
def merge_objection(device: torch.device) -> str | None:
    """Why `device` repeats keys: what is wrong with its kernel; None = nothing, "" = it has none."""
    is_cuda, stream = torch.empty(0, device=device).is_cuda, torch.Generator().manual_seed(0)
    if not is_cuda and not (device.type == "cpu" and torch_compat.has_grouped_cpu_attention()):
        return ""
    dtype = torch.bfloat16 if is_cuda else torch.float32
    ends, ones = (torch.tensor(n, dtype=torch.int32, device=device) for n in ([0, 2, 3, 6], [0, 2]))
    every = torch.arange(6, device=device)
    prompts = SharedPrompts(ends, every[2:], every[:2], 2 * ones, ones, torch.tensor([3, 4, 2]))
    query, key, value = (
        torch.randn(1, n, 6, 64, generator=stream).to(device, dtype).requires_grad_() for n in (4, 2, 2)
    )
    seen = (every[:, None] >= every) & ((every != 2) | (every[:, None] == 2))  # nothing continues row 2, of one token
    try:
        with torch.enable_grad():
            wanted = F.scaled_dot_product_attention(query, key, value, seen, enable_gqa=True).transpose(1, 2)
            got = prompts.attend(query, key, value, 64**-0.5)
            gradients = [torch.autograd.grad(one.square().sum(), (query, key, value)) for one in (got, wanted)]
    except (RuntimeError, TypeError) as error:  # of whatever kind a release of torch refuses with
        return f"its kernel fails: {str(error).strip().splitlines()[0]}"
    limit = 64 * torch.finfo(dtype).eps
    pairs = zip((got.detach(), *gradients[0]), (wanted.detach(), *gradients[1]), strict=True)
    is_close = all(float((one - two).norm()) <= limit * float(two.norm()) for one, two in pairs)
    return None if is_close else "its kernel differs from the definition of attention"
