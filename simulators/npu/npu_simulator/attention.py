"""The fused attention of the NPU as plain arithmetic: output, softmax statistics and gradient.

    s = scale · q kᵀ, hidden where the mask says so;   p = softmax(s);   out = (p ∘ m / keep) v
    dp = (dy vᵀ) ∘ m / keep;   ds = p ∘ (dp − Σ dp ∘ p)
    dq = scale · ds k;   dk = scale · dsᵀ q;   dv = (p ∘ m / keep)ᵀ dy

Legend: B batch, N query heads, K key heads (N a multiple of K), S queries, L keys, d head size, T tokens end to end.
Computed in float32. Source: documentation and schema of `npu_fusion_attention` in torch_npu 2.13. Departures: the
dropout mask m is another random one; pse, prefix, sinks and sparse modes 5 … 8 are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from npu_simulator.draw import stream
from npu_simulator.strict import need, need_absent, need_ends, need_floats, need_heads, need_mask, need_rows

OPERATOR = "npu_fusion_attention"
STATISTICS = 8  # the card writes each maximum and each sum this many times
ABSENT = ("pse", "padding_mask", "prefix", "sink", "dropout_mask")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a call says beside its tensors, by the names of the schema."""

    heads: int
    layout: str
    scale: float
    keep: float
    before: int
    after: int
    inner_precise: int
    mode: int
    query_ends: Sequence[int] | None
    key_ends: Sequence[int] | None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """From the operator's arguments, forward or backward. Raises Refused for those that are not simulated."""
        need_absent(OPERATOR, **{name: given.get(name) for name in ABSENT})
        return cls(
            heads=given["head_num"],
            layout=given["input_layout"],
            scale=given["scale"] if "scale" in given else given["scale_value"],
            keep=given["keep_prob"],
            before=given["pre_tockens"],
            after=given["next_tockens"],
            inner_precise=given["inner_precise"],
            mode=given["sparse_mode"],
            query_ends=given["actual_seq_qlen"],
            key_ends=given["actual_seq_kvlen"],
        )


def forward(given: Mapping[str, Any], seed: int, offset: int) -> tuple[Any, ...]:
    """The operator's seven outputs: attention in the layout of query; maximum and sum of the softmax, float32
    [B, N, S, 8] or [T, N, 8]; an empty tensor; seed, offset and size of the dropout mask. Raises Refused.
    """
    query, key, value, mask = (given[name] for name in ("query", "key", "value", "atten_mask"))
    options = Options.of(given)
    check(query, key, value, mask, options)
    outs, tops, sums = [], [], []
    random = stream(seed, offset)
    for q, k, v in blocks(query, key, value, options):
        need_heads(OPERATOR, q, k, v)
        p, top, total = softmax(q, k, hidden(q.shape[2], k.shape[2], mask, options), options)
        outs.append((p * kept(p, options, random)) @ repeated(v, q))
        tops.append(top)
        sums.append(total)
    out = joined(outs, options).to(query.dtype)
    size = 0 if options.keep == 1.0 else query.numel()
    return out, statistics(tops, options), statistics(sums, options), query.new_empty(0), seed, offset, size


def backward(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """The five outputs of the gradient: of query, key and value; an empty one of pse and of sink. Raises Refused."""
    query, key, value, dy, mask = (given[name] for name in ("query", "key", "value", "dy", "atten_mask"))
    options = Options.of(given)
    random = stream(given["seed"], given["offset"])
    grads: list[list[Tensor]] = [[], [], []]
    for (q, k, v), (g, _, _) in zip(blocks(query, key, value, options), blocks(dy, key, value, options), strict=True):
        p, _, _ = softmax(q, k, hidden(q.shape[2], k.shape[2], mask, options), options)
        keep = kept(p, options, random)
        dp = g @ repeated(v, q).transpose(2, 3) * keep
        ds = p * (dp - (dp * p).sum(-1, keepdim=True))
        grads[0].append(options.scale * ds @ repeated(k, q))
        grads[1].append(summed(options.scale * ds.transpose(2, 3) @ q, k))
        grads[2].append(summed((p * keep).transpose(2, 3) @ g, v))
    dq, dk, dv = (joined(parts, options).to(query.dtype) for parts in grads)
    return dq, dk, dv, query.new_empty(0), query.new_empty(0)


def check(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: Options) -> None:
    """Raise Refused for what the card does not take."""
    need_floats(OPERATOR, query=query, key=key, value=value)
    known = ("BSH", "SBH", "BSND", "BNSD", "TND")
    need(options.layout in known, OPERATOR, f"input_layout {options.layout!r} is none of {', '.join(known)}")
    need(options.mode in range(5), OPERATOR, f"sparse_mode {options.mode} is not simulated; 0 … 4 are")
    need(0 < options.keep <= 1, OPERATOR, f"keep_prob {options.keep} is outside (0, 1]")
    need(options.inner_precise in (0, 1, 2), OPERATOR, f"inner_precise {options.inner_precise} is none of 0, 1, 2")
    need_mask(OPERATOR, options.mode, mask)
    if options.layout == "TND":
        need(query.dim() == key.dim() == 3, OPERATOR, "input_layout TND takes [T, N, d]")
        need_ends(OPERATOR, options.query_ends, "actual_seq_qlen", len(query))
        need_ends(OPERATOR, options.key_ends, "actual_seq_kvlen", len(key))
        assert options.query_ends is not None and options.key_ends is not None
        need(len(options.query_ends) == len(options.key_ends), OPERATOR, "actual_seq_qlen and actual_seq_kvlen differ")


def blocks(query: Tensor, key: Tensor, value: Tensor, options: Options) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """What attends to itself, as float32 [B, N, S, d], [B, K, L, d], [B, K, L, d]: the batch, or each sequence."""
    if options.layout != "TND":
        groups = key_heads(query, key, options)
        yield by_head(query, options, options.heads), by_head(key, options, groups), by_head(value, options, groups)
        return
    assert options.query_ends is not None and options.key_ends is not None
    for q, k, v in zip(
        query.split(lengths(options.query_ends)),
        key.split(lengths(options.key_ends)),
        value.split(lengths(options.key_ends)),
        strict=True,
    ):
        yield q.transpose(0, 1)[None].float(), k.transpose(0, 1)[None].float(), v.transpose(0, 1)[None].float()


def lengths(ends: Sequence[int]) -> list[int]:
    """Of each sequence; those left out at the end have none."""
    before = [0, *ends[:-1]]
    return [max(end - start, 0) for start, end in zip(before, ends, strict=True)]


def key_heads(query: Tensor, key: Tensor, options: Options) -> int:
    """K: where heads and their sizes share a dimension, the size is that of the query's."""
    if options.layout in ("BSH", "SBH"):
        size = query.shape[2] // options.heads
        need(
            query.shape[2] == size * options.heads,
            OPERATOR,
            f"{query.shape[2]} is no multiple of {options.heads} heads",
        )
        return int(key.shape[2]) // size
    return int(key.shape[2 if options.layout == "BSND" else 1])


def by_head(tensor: Tensor, options: Options, heads: int) -> Tensor:
    """Float32 [B, heads, S, d]."""
    match options.layout:
        case "BNSD":
            found = tensor
        case "BSND":
            found = tensor.transpose(1, 2)
        case "BSH":
            found = tensor.unflatten(2, (heads, -1)).transpose(1, 2)
        case _:  # SBH
            found = tensor.unflatten(2, (heads, -1)).permute(1, 2, 0, 3)
    need(found.shape[1] == heads, OPERATOR, f"head_num is {heads}, and there are {found.shape[1]} heads")
    return found.float()


def joined(parts: Sequence[Tensor], options: Options) -> Tensor:
    """Blocks [B, heads, S, d] in the layout of the call again."""
    match options.layout:
        case "TND":
            return torch.cat([part[0].transpose(0, 1) for part in parts])
        case "BNSD":
            return parts[0].contiguous()
        case "BSND":
            return parts[0].transpose(1, 2).contiguous()
        case "BSH":
            return parts[0].transpose(1, 2).flatten(2)
        case _:  # SBH
            return parts[0].permute(2, 0, 1, 3).flatten(2)


def statistics(parts: Sequence[Tensor], options: Options) -> Tensor:
    """[B, N, S, 1] of each block → [B, N, S, 8], or [T, N, 8]."""
    if options.layout == "TND":
        return torch.cat([part[0].transpose(0, 1) for part in parts]).repeat(1, 1, STATISTICS)
    return parts[0].repeat(1, 1, 1, STATISTICS)


def hidden(queries: int, keys: int, mask: Tensor | None, options: Options) -> Tensor | None:
    """Bool, [S, L] or with leading dimensions of B and N: True where a key is not seen; None if all are."""
    if mask is None:
        return None
    row, column = torch.arange(queries)[:, None], torch.arange(keys)
    ahead = column - row  # of the top left corner
    from_last = ahead - (keys - queries)  # of the bottom right corner
    match options.mode:
        case 0:
            full = mask.bool()[..., :queries, :keys] if options.layout == "TND" else mask.bool()
            need(tuple(full.shape[-2:]) == (queries, keys), OPERATOR, f"atten_mask is {tuple(mask.shape)}")
            found = full | (-ahead > options.before) | (ahead > options.after)
        case 1:
            found = mask.bool()[..., :queries, :keys] if options.layout == "TND" else mask.bool()
        case 2:
            found = ahead > 0
        case 3:
            found = from_last > 0
        case _:
            found = (-from_last > options.before) | (from_last > options.after)
    treated = options.inner_precise == 2 or options.mode == 3
    if options.layout == "TND":
        need_rows(OPERATOR, found, False, "sequences end to end cannot have such rows")
    else:
        need_rows(OPERATOR, found, treated, "without inner_precise=2 the card is imprecise there")
    return found


def softmax(query: Tensor, key: Tensor, unseen: Tensor | None, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """[B, N, S, L] probabilities, and [B, N, S, 1] maxima and sums; a row that sees nothing is 0."""
    scores = options.scale * query @ repeated(key, query).transpose(2, 3)
    if unseen is not None:
        scores = scores.masked_fill(unseen, -torch.inf)
    if scores.numel() == 0:
        empty = scores.new_zeros(*scores.shape[:3], 1)
        return scores, empty, empty
    top = scores.amax(-1, keepdim=True)
    exponentials = (scores - top.masked_fill(top.isinf(), 0.0)).exp()
    total = exponentials.sum(-1, keepdim=True)
    return exponentials / total.masked_fill(total == 0, 1.0), top, total


def repeated(keys: Tensor, query: Tensor) -> Tensor:
    """[B, K, L, d] → [B, N, L, d]: each key head for its group of query heads."""
    times = query.shape[1] // keys.shape[1]
    return keys if times == 1 else keys.repeat_interleave(times, dim=1)


def summed(gradient: Tensor, keys: Tensor) -> Tensor:
    """[B, N, L, d] → [B, K, L, d]: over the query heads of each group."""
    return gradient.unflatten(1, (keys.shape[1], -1)).sum(2)


def kept(p: Tensor, options: Options, random: torch.Generator) -> Tensor:
    """What dropout multiplies the probabilities with: 0, or 1 / keep."""
    if options.keep == 1.0:
        return torch.ones(())
    return (torch.rand(p.shape, generator=random) < options.keep).float() / options.keep
