"""Attention of sequences end to end by the fused operator of Ascend NPUs, `npu_fusion_attention` (layout TND).

    flash-attention          npu_fusion_attention
    softmax_scale            scale, which is 1 unless it is given
    causal, last keys        sparse_mode 3 with the compressed mask; without a mask nothing is masked
    window (w - 1, 0)        sparse_mode 4, pre_tockens w - 1, next_tockens 0, counted from the last key
    cu_seqlens               actual_seq_qlen, actual_seq_kvlen: numbers of the host, without the leading 0
    dropout_p                keep_prob = 1 - p
    mask True = seen         atten_mask True = masked

Source: the operator's own documentation in torch_npu 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

MOST_SEQUENCES = 1024  # of one call in this layout
MASK_SIZE = 2048  # of the compressed mask, whatever the lengths
RIGHT_DOWN_CAUSAL, BAND = 3, 4


class FusionAttention:
    """`VarlenAttention` by `operator`, which has the signature and the meaning of `torch_npu.npu_fusion_attention`."""

    def __init__(self, operator: Callable[..., Sequence[Any]]) -> None:
        self._operator = operator

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        query_lengths: tuple[int, ...],
        key_lengths: tuple[int, ...],
        window: int | None,
        dropout: float,
        scale: float,
    ) -> Tensor:
        """See `VarlenAttention`. Raises ValueError for a sequence with more queries than keys."""
        calls = _calls(query_lengths, key_lengths)
        query_parts = query.split([queries[-1] for queries, _ in calls])
        key_parts, value_parts = (tensor.split([keys[-1] for _, keys in calls]) for tensor in (key, value))
        done = []
        for (queries, keys), q, k, v in zip(calls, query_parts, key_parts, value_parts, strict=True):
            out = self._operator(
                q.contiguous(),
                k.contiguous(),
                v.contiguous(),
                head_num=query.shape[1],
                input_layout="TND",
                atten_mask=_mask(query.device),
                scale=scale,
                keep_prob=1.0 - dropout,
                actual_seq_qlen=list(queries),
                actual_seq_kvlen=list(keys),
                **_sparsity(window, max(key_lengths)),
            )[0]
            done.append(out)
        return done[0] if len(done) == 1 else torch.cat(done)


def _sparsity(window: int | None, longest: int) -> dict[str, int]:
    if window is None or window >= longest:
        return {"sparse_mode": RIGHT_DOWN_CAUSAL}
    return {"sparse_mode": BAND, "pre_tockens": window - 1, "next_tockens": 0}


@lru_cache(maxsize=8)  # every layer asks for the same
def _calls(query_lengths: tuple[int, ...], key_lengths: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """The cumulative lengths of queries and keys for each call of the operator."""
    if any(keys < queries for queries, keys in zip(query_lengths, key_lengths, strict=True)):
        raise ValueError("a sequence has more queries than keys: its first ones would see nothing")
    starts = range(0, len(query_lengths), MOST_SEQUENCES)
    cut = [slice(start, start + MOST_SEQUENCES) for start in starts]
    return [(list(accumulate(query_lengths[piece])), list(accumulate(key_lengths[piece]))) for piece in cut]


@lru_cache(maxsize=8)
def _mask(device: torch.device) -> Tensor:
    """The compressed causal mask: True above the diagonal, where nothing may be seen."""
    return torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.bool, device=device).triu(1)
