"""Attention by ranks that each have some tokens: each attends for some heads of all tokens (Jacobs et al., 2309.14509).

    q k v of W tokens, all heads ──all-to-all──▶ of T tokens, h/C heads ──attention as ever──▶ ──all-to-all──▶ W, h

Whatever attends to rows that lie end to end does so here: kernels, buckets, shared prompts, windows. Key-value heads
that C does not divide are repeated until it does; the paper has as many of them as of heads.

Legend: T tokens, C ranks, W tokens of each, h heads, d head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch import Tensor

from runner.collectives import exchanged
from runner.model.attention import Rows, UnsupportedAttention, of_one_type


@dataclass(frozen=True, slots=True)
class Ulysses:
    """rows: where rows of the whole batch end; slots: int64 [T], where each of its tokens is in what all ranks have,
    end to end; held: int64 [C · W], which token is there."""

    rows: Rows
    group: Any
    size: int
    slots: Tensor
    held: Tensor

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, window: int | None, dropout: float, scale: float | None
    ) -> Tensor:
        """As `Rows.attend`, of tensors with this rank's W tokens. Collective in both directions."""
        heads, kv_heads = query.shape[1], key.shape[1]
        if heads % self.size:
            raise UnsupportedAttention(f"{self.size} ranks do not divide its {heads} heads")
        repeats = self.size // gcd(kv_heads, self.size)
        key, value = (t.repeat_interleave(repeats, 1) if repeats > 1 else t for t in (key, value))
        query, key, value = self._all_tokens(of_one_type(query, key, value))
        return self._all_heads(self.rows.attend(query, key, value, window, dropout, scale))

    def _all_tokens(self, tensors: list[Tensor]) -> list[Tensor]:
        """[1, heads, W, d] → [1, heads/C, T, d], of several, in one message."""
        shares = [t[0].transpose(0, 1).unflatten(1, (self.size, -1)) for t in tensors]  # [W, C, heads/C, d]
        message = torch.cat([share.flatten(2) for share in shares], 2).transpose(0, 1)
        found = exchanged(message.flatten(0, 1), self.group).index_select(0, self.slots)
        parts = found.split([share.shape[2] * share.shape[3] for share in shares], 1)
        return [p.unflatten(1, s.shape[2:]).transpose(0, 1)[None] for p, s in zip(parts, shares, strict=True)]

    def _all_heads(self, out: Tensor) -> Tensor:
        """[1, T, heads/C, d] → [1, W, heads, d]."""
        message = out[0].index_select(0, self.held)
        found = exchanged(message.flatten(1), self.group).view(self.size, -1, *message.shape[1:])
        return found.transpose(0, 1).flatten(1, 2)[None]
