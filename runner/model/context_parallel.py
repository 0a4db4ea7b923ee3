"""Context parallel: each rank has some tokens of a batch; attention reaches those of other ranks.

    batch [T] ──2·C runs──▶ a rank's tokens [W] ──model, whose attention reaches the others'──▶ hidden [W, H]
              hidden of the tokens before ──heads──▶ outputs of what they predict ──added over the ranks──▶ [T], on all

Rank r of C has the runs r and 2·C − 1 − r: early tokens, which see little, and late ones, which see much (Llama 3,
2407.21783, section 3.3.2). All ranks have equally many; where the batch does not divide, its last token stands in for
what is missing, and nothing is read of that. Every rank knows the whole batch and finds out on the CPU what the others
have; what the model computes is never requested.

    q k v of W tokens, all heads ──all-to-all──▶ of T tokens, h/C heads ──attention as ever──▶ ──all-to-all──▶ W, h

Ulysses (Jacobs et al., 2309.14509): each rank attends for some heads of all tokens. Whatever attends to rows that lie
end to end does so here: kernels, buckets, shared prompts, windows. Key-value heads that C does not divide are repeated
until it does; the paper has as many of them as of heads. For the other way see `runner.model.ring_attention`.

Legend: T tokens, C ranks, W tokens of each, S predicted tokens, h heads, d head size, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import Any

import torch
from torch import Tensor

from runner.core.batch import Batch
from runner.distributed.autograd_collectives import all_reduce, all_to_all_autograd
from runner.interfaces import ContextParallelStyle, VarlenAttention
from runner.model.batch_layout import BatchTokens, ForwardFn, run_with_attention
from runner.model.packed_attention import PackedRows, UnsupportedAttention, plan_attention, promote_to_common_dtype
from runner.model.ring_attention import CpMask, RingAttention


@dataclass(frozen=True, slots=True)
class UlyssesAttention:
    """Ulysses attention of one batch.

    rows: where rows of the whole batch end; slots: int64 [T], the index of each token in the concatenation over ranks;
    held: int64 [C · W], the token at each index.
    """

    rows: PackedRows
    group: Any
    size: int
    slots: Tensor
    held: Tensor

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, window: int | None, dropout: float, scale: float | None
    ) -> Tensor:
        """As `PackedRows.attend`, of tensors with this rank's W tokens. Collective in both directions."""
        heads, kv_heads = query.shape[1], key.shape[1]
        if heads % self.size:
            raise UnsupportedAttention(f"{self.size} ranks do not divide its {heads} heads")
        repeats = self.size // gcd(kv_heads, self.size)
        key, value = (t.repeat_interleave(repeats, 1) if repeats > 1 else t for t in (key, value))
        query, key, value = self._scatter_heads(promote_to_common_dtype(query, key, value))
        return self._gather_heads(self.rows.attend(query, key, value, window, dropout, scale))

    def _scatter_heads(self, tensors: list[Tensor]) -> list[Tensor]:
        """[1, heads, W, d] → [1, heads/C, T, d], of several, in one message."""
        shares = [t[0].transpose(0, 1).unflatten(1, (self.size, -1)) for t in tensors]  # [W, C, heads/C, d]
        message = torch.cat([share.flatten(2) for share in shares], 2).transpose(0, 1)
        found = all_to_all_autograd(message.flatten(0, 1), self.group).index_select(0, self.slots)
        parts = found.split([share.shape[2] * share.shape[3] for share in shares], 1)
        return [p.unflatten(1, s.shape[2:]).transpose(0, 1)[None] for p, s in zip(parts, shares, strict=True)]

    def _gather_heads(self, out: Tensor) -> Tensor:
        """[1, T, heads/C, d] → [1, W, heads, d]."""
        message = out[0].index_select(0, self.held)
        found = all_to_all_autograd(message.flatten(1), self.group).view(self.size, -1, *message.shape[1:])
        return found.transpose(0, 1).flatten(1, 2)[None]


@dataclass(frozen=True, slots=True)
class ContextParallelGroup:
    """Those who have a share of every batch's tokens, as one of them sees them."""

    group: Any
    rank: int
    size: int
    style: ContextParallelStyle

    def shard_tokens(self, batch: Batch) -> BatchTokens:
        """This rank's share of a batch."""
        return CpShard(batch, self)


class CpShard(BatchTokens):
    """This rank's tokens of a batch. All ranks call the same methods in the same order."""

    def __init__(self, batch: Batch, ranks: ContextParallelGroup) -> None:
        super().__init__(batch)
        self._ranks = ranks
        self._held, self._real = token_assignment(batch.num_tokens, ranks.size)
        slots = torch.empty(batch.num_tokens, dtype=torch.int64)  # of each token among those of all ranks, end to end
        slots[self._held[self._real]] = self._real.flatten().nonzero()[:, 0]
        self._slots = slots

    def run(self, forward: ForwardFn, kernel: VarlenAttention | None) -> Tensor:
        """See `BatchTokens`."""
        held = self.to_device(self._held[self._ranks.rank])
        ids, positions = (self.batch.tokens[name].index_select(0, held) for name in ("ids", "positions"))
        return run_with_attention(forward, ids, positions, self._attention(kernel))

    def _attention(self, kernel: VarlenAttention | None) -> UlyssesAttention | RingAttention:
        ranks = self._ranks
        if ranks.style == "ring":
            return RingAttention(
                CpMask(self.batch.structure, self._held, self._real), ranks.group, ranks.rank, self.device
            )
        rows = plan_attention(self.batch, kernel)
        return UlyssesAttention(
            rows, ranks.group, ranks.size, self.to_device(self._slots), self.to_device(self._held.flatten())
        )

    def locally_predicted(self, places: Tensor) -> Tensor:
        """See `BatchTokens`."""
        parents = self.batch.structure.tokens["parent"].to(places.device)[places]
        return places[self.is_local(parents)]

    def is_local(self, places: Tensor) -> Tensor:
        """See `BatchTokens`."""
        return self._slots.to(places.device)[places] // self._held.shape[1] == self._ranks.rank

    def values_at(self, values: Tensor, places: Tensor) -> Tensor:
        """See `BatchTokens`."""
        return values.index_select(0, self._index[places])

    @cached_property
    def _index(self) -> Tensor:
        """Where each token is among those of its rank, int64 [T] on the batch's device."""
        return self.to_device(self._slots % self._held.shape[1])

    def scatter_and_sum(self, values: Tensor, at: Tensor, size: int) -> Tensor:
        """See `BatchTokens`. Each rank finds the gradient of its own."""
        return all_reduce(super().scatter_and_sum(values, at, size), self._ranks.group)

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        """See `BatchTokens`. Each rank finds the gradient of its own."""
        return all_reduce(value, self._ranks.group)

    def gather_all(self, values: Tensor) -> Tensor:
        """See `BatchTokens`."""
        places = self.to_device(self._held[self._ranks.rank][self._real[self._ranks.rank]])
        return self.scatter_and_sum(self.values_at(values, places), places, self.batch.num_tokens)


def token_assignment(tokens: int, ranks: int) -> tuple[Tensor, Tensor]:
    """Indices of each rank's tokens, int64 [C, W], ascending, and which of them it computes, bool [C, W].

    The others repeat the last token.
    """
    length = -(-tokens // (2 * ranks))
    early = torch.arange(ranks)
    runs = torch.stack([early, 2 * ranks - 1 - early], 1)
    places = (runs[..., None] * length + torch.arange(length)).flatten(1)
    return places.clamp(max=tokens - 1), places < tokens
