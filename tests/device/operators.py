"""The operators of torch_npu that the adapters use, as their documentation defines them, in plain torch on the CPU.

Written from the definitions and not from the adapters: masks are built element by element, softmax in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

INFINITE = 2147483647


def seen(rows: int, columns: int, mode: int, mask: Tensor | None, before: int, after: int) -> Tensor:
    """What a [rows, columns] product keeps. The modes used want the mask of 2048 x 2048, True above the diagonal."""
    if mask is None:
        return torch.ones(rows, columns, dtype=torch.bool)
    kept = torch.zeros(rows, columns, dtype=torch.bool)
    assert mode in (3, 4), "the others are not used"
    assert mask.dtype == torch.bool and mask.shape == (2048, 2048)
    for row in range(rows):
        for column in range(columns):
            ahead = (column - columns) - (row - rows)  # of the key before the query, counted from the last of both
            if mode == 3:
                kept[row, column] = not bool(mask[(0, 1) if ahead > 0 else (1, 0)])
            else:
                inside = -before <= ahead <= after
                kept[row, column] = inside and not bool(mask[1, 0])
    return kept


def npu_fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = INFINITE,
    next_tockens: int = INFINITE,
    inner_precise: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
) -> tuple[Tensor, ...]:
    """Layouts TND and BNSD only. Refuses what the operator refuses: tensors for lengths, long lists, rows without a
    key."""
    assert pse is None and padding_mask is None and prefix is None
    if input_layout == "BNSD":
        assert actual_seq_qlen is None and actual_seq_kvlen is None
        out = dense(query, key, value, head_num, atten_mask, scale, keep_prob, inner_precise, sparse_mode)
        return (out, *[torch.empty(0)] * 3, 0, 0, 0)
    assert input_layout == "TND"
    assert query.dtype == key.dtype == value.dtype and query.shape[1] == head_num
    assert key.shape == value.shape and head_num % key.shape[1] == 0
    ends = []
    for lengths in (actual_seq_qlen, actual_seq_kvlen):
        assert lengths is not None and all(type(n) is int for n in lengths) and 1 <= len(lengths) <= 1024
        ends.append([0, *lengths])
    assert len(ends[0]) == len(ends[1]), "as many sequences of keys as of queries"
    assert ends[0][-1] == len(query) and ends[1][-1] == len(key), "cumulative, without the leading 0"
    out = []
    for i in range(len(ends[0]) - 1):
        q = query[ends[0][i] : ends[0][i + 1]].double()
        k, v = (
            x[ends[1][i] : ends[1][i + 1]].double().repeat_interleave(head_num // x.shape[1], 1) for x in (key, value)
        )
        kept = seen(len(q), len(k), sparse_mode, atten_mask, pre_tockens, next_tockens)
        assert len(q) == 0 or bool(kept.any(1).all()), "no row may be masked entirely in this layout"
        scores = torch.einsum("qhd,khd->hqk", q, k).mul(scale).masked_fill(~kept, -torch.inf)
        weights = scores.softmax(-1)
        if keep_prob < 1:
            weights = torch.nn.functional.dropout(weights, 1 - keep_prob)
        out.append(torch.einsum("hqk,khd->qhd", weights, v))
    return (torch.cat(out).to(query.dtype), *[torch.empty(0)] * 3, 0, 0, 0)


def dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    mask: Tensor | None,
    scale: float,
    keep_prob: float,
    inner_precise: int,
    mode: int,
) -> Tensor:
    """[B, N, S, d]: modes 0 without a mask (all is seen), 1 with the whole of one, 3 with the compressed one."""
    assert query.is_contiguous() and key.is_contiguous() and value.is_contiguous() and query.numel() and key.numel()
    assert query.dtype == key.dtype == value.dtype and query.shape[1] == head_num and keep_prob == 1
    rows, columns = query.shape[2], key.shape[2]
    if mode == 1:
        assert mask is not None and mask.dtype == torch.bool and mask.shape[-2:] == (rows, columns)
        kept = ~mask
    else:
        assert mode == 3 or (mode == 0 and mask is None)
        kept = seen(rows, columns, mode, mask, INFINITE, INFINITE)
    assert inner_precise == 2 or mode == 3 or bool(kept.any(-1).all()), "imprecise where a row sees nothing"
    q, k, v = (x.double().repeat_interleave(head_num // x.shape[1], 1) for x in (query, key, value))
    weights = (q @ k.transpose(2, 3)).mul(scale).masked_fill(~kept, -torch.inf).softmax(-1)
    return (weights.masked_fill(~kept, 0).nan_to_num() @ v).to(query.dtype)


def npu_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """x / root of the mean square · gamma, rounded once."""
    assert x.dtype == gamma.dtype
    wide = x.double()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * rstd * gamma.double()).to(x.dtype), rstd.float()


def npu_rotary_mul(
    x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    """x · r1 + turned(x) · r2; "half" pairs a feature with that half a head away, "interleave" with its neighbor."""
    assert x.dim() == r1.dim() == r2.dim() == 4 and x.dtype == r1.dtype == r2.dtype and rotate is None
    assert x.shape[-1] < 896 and x.shape[-1] % 2 == 0
    half = x.shape[-1] // 2
    turned = torch.empty_like(x)
    if rotary_mode == "half":
        turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    elif rotary_mode == "interleave":
        turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    else:
        raise RuntimeError(f"no such mode: {rotary_mode}")
    return x * r1 + turned * r2


def npu_swiglu(x: Tensor, dim: int = -1) -> Tensor:
    """silu(first half) · second half along `dim`."""
    gate, up = x.chunk(2, dim)
    return gate * gate.sigmoid() * up


def npu_grouped_matmul(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    *,
    group_list: Tensor,
    split_item: int = 0,
    group_type: int | None = None,
    group_list_type: int = 0,
) -> list[Tensor]:
    """One tensor in, one out, cumulative group ends; 0 groups rows of [m, k] x [e, k, n], 2 the sum of [m, k] x [k, n].

    As the operator has none, this gives no gradient.
    """
    assert len(x) == len(weight) == 1 and split_item in (2, 3) and group_list_type == 0
    assert group_list.dtype == torch.int64 and x[0].dtype == weight[0].dtype
    left, right, ends = x[0].detach(), weight[0].detach(), [0, *group_list.tolist()]
    spans = [slice(a, b) for a, b in pairwise(ends)]
    if group_type == 0:
        assert right.dim() == 3 and len(spans) == len(right) and ends[-1] == len(left)
        return [torch.cat([left[span] @ right[e] for e, span in enumerate(spans)])]
    assert group_type == 2 and right.dim() == 2 and ends[-1] == left.shape[1] == len(right)
    return [torch.stack([left[:, span] @ right[span] for span in spans])]


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    deterministic: bool = False,
) -> Tensor:
    """flash-attn's meaning: bottom-right causal; a window counts the keys beside the query's own, -1 for all."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32 and cu_seqlens_q[0] == cu_seqlens_k[0] == 0
    out = []
    for a, b, c, d in zip(cu_seqlens_q, cu_seqlens_q[1:], cu_seqlens_k, cu_seqlens_k[1:], strict=False):
        assert b - a <= max_seqlen_q and d - c <= max_seqlen_k
        left, right = window_size[0], 0 if causal else window_size[1]
        query, key, value = q[a:b].double(), k[c:d].double(), v[c:d].double()
        key, value = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (key, value))
        kept = torch.zeros(len(query), len(key), dtype=torch.bool)
        for row in range(len(query)):
            last = len(key) - len(query) + row
            for column in range(len(key)):
                kept[row, column] = (left < 0 or column >= last - left) and (right < 0 or column <= last + right)
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        scores = torch.einsum("qhd,khd->hqk", query, key).mul(scale).masked_fill(~kept, -torch.inf)
        out.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), value))
    return torch.cat(out).to(q.dtype)


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """torch's: the same, and heads may differ only where it is said."""
    assert enable_gqa or query.shape[1] == key.shape[1]
    edges: Any = (cu_seq_q, cu_seq_k, max_q, max_k)
    return flash_attn_varlen_func(query, key, value, *edges, softmax_scale=scale, window_size=window_size)


def flash_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float,
) -> tuple[Tensor, ...]:
    """aten's: the output, and the log-sum-exp [heads, tokens] in float32."""
    assert dropout_p == 0 and not return_debug_mask
    found = [
        (torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1))
        for _, _, v, scores in _flash_scores(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, is_causal, scale)
    ]
    out, sums = (torch.cat(parts, at) for at, parts in enumerate(zip(*found, strict=True)))
    return out.to(query.dtype), sums.float(), *[torch.empty(0)] * 3


def flash_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float,
) -> tuple[Tensor, ...]:
    """aten's: weights from the log-sum-exp that is given, their gradients from the output that is given."""
    assert dropout_p == 0 and rng_state.dtype == torch.uint64 and logsumexp.is_contiguous() and grad_out.stride(-1) == 1
    grads = []
    rows = zip(*(x.split(cum_seq_q.diff().tolist()) for x in (grad_out, out, logsumexp.t())), strict=True)
    parts = _flash_scores(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, is_causal, scale)
    for (grad, own, sums), (q, k, v, scores) in zip(rows, parts, strict=True):
        weights, grad = (scores - sums.t()[..., None]).exp(), grad.double()
        inner = (grad * own).sum(-1).t()[..., None]
        d_scores = weights * (torch.einsum("qhd,khd->hqk", grad, v) - inner) * scale
        d_kv = torch.einsum("hqk,qhd->khd", d_scores, q), torch.einsum("hqk,qhd->khd", weights, grad)
        fewer = (x.unflatten(1, (key.shape[1], -1)).sum(2) for x in d_kv)
        grads.append((torch.einsum("hqk,khd->qhd", d_scores, k), *fewer))
    return tuple(torch.cat(one).to(query.dtype) for one in zip(*grads, strict=True))


def _flash_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_q: Tensor,
    cum_k: Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
    scale: float,
) -> list[tuple[Tensor, ...]]:
    """Of each sequence query, key and value, in float64 and for all heads, and the scores [heads, queries, keys]."""
    assert cum_q.dtype == cum_k.dtype == torch.int32 and cum_q[0] == cum_k[0] == 0
    assert int(cum_q.diff().max()) == max_q and int(cum_k.diff().max()) == max_k
    found, sizes = [], (cum_q.diff().tolist(), *[cum_k.diff().tolist()] * 2)
    for parts in zip(*(x.split(n) for x, n in zip((query, key, value), sizes, strict=True)), strict=True):
        q, k, v = (x.double().repeat_interleave(query.shape[1] // x.shape[1], 1) for x in parts)
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        seen = torch.ones(scores.shape[1:], dtype=torch.bool)
        found.append((q, k, v, scores.masked_fill(~seen.tril(), -torch.inf) if causal else scores))
    return found
