"""Huawei Ascend NPUs as a device, and attention there.

Attention is by `npu_fusion_attention` of Ascend NPUs: packed sequences (TND) and padded rows (BNSD).

    flash-attention          npu_fusion_attention
    softmax_scale            scale, which is 1 unless it is given
    causal, last keys        sparse_mode 3 with the compressed mask; without a mask nothing is masked
    window (w - 1, 0)        sparse_mode 4, pre_tockens w - 1, next_tockens 0, counted from the last key
    cu_seqlens               actual_seq_qlen, actual_seq_kvlen: numbers of the host, without the leading 0
    dropout_p                keep_prob = 1 - p
    mask True = seen         atten_mask True = masked; sparse_mode 1 reads it as it is
    a row that sees nothing  inner_precise 2, or the result is imprecise; in TND there may be none

Source: the operator's own documentation in torch_npu 2.13.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from runner.core.device_kinds import VARIABLES
from runner.core.errors import EnvironmentProblem
from runner.device.base import TorchDevice, refuse_hidden, select_card
from runner.device.config import NpuConfig
from runner.device.device_stats import StatsReader, npu_stats_reader
from runner.device.fused_modules import install_fused_ops
from runner.interfaces import Decide, DenseAttention, VarlenAttention
from runner.interfaces.model import DenseOptions, VarlenOptions

MOST_SEQUENCES = 1024  # of one call in this layout
MASK_SIZE = 2048  # of the compressed mask, whatever the lengths
WHOLE_MASK, RIGHT_DOWN_CAUSAL, BAND = 1, 3, 4
ROWS_WITHOUT_KEYS = 2  # of inner_precise


class FusionAttention:
    """`VarlenAttention` by `operator`, which has the signature of `torch_npu.npu_fusion_attention`."""

    def __init__(self, operator: Callable[..., Sequence[Any]]) -> None:
        self._operator = operator

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **options: Unpack[VarlenOptions]) -> Tensor:
        """See `VarlenAttention`. Raises ValueError for a sequence with more queries than keys."""
        queries, keys = options["queries"], options["keys"]
        calls = _calls(queries.lengths, keys.lengths)
        query_parts = query.split([ends[-1] for ends, _ in calls])
        key_parts, value_parts = (tensor.split([ends[-1] for _, ends in calls]) for tensor in (key, value))
        done = list[Tensor]()
        for (query_ends, key_ends), q, k, v in zip(calls, query_parts, key_parts, value_parts, strict=True):
            done += self._operator(
                *(one.contiguous() for one in (q, k, v)),
                head_num=query.shape[1],
                input_layout="TND",
                atten_mask=_mask(query.device),
                scale=options["scale"],
                keep_prob=1.0 - options["dropout"],
                actual_seq_qlen=list(query_ends),
                actual_seq_kvlen=list(key_ends),
                **_sparsity(options["window"], keys.longest),
            )[:1]
        return done[0] if len(done) == 1 else torch.cat(done)


class DenseFusionAttention:
    """`DenseAttention` by the same `operator`."""

    def __init__(self, operator: Callable[..., Sequence[Any]]) -> None:
        self._operator = operator

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **options: Unpack[DenseOptions]) -> Tensor:
        """See `DenseAttention`."""
        if 0 in query.shape or 0 in key.shape:  # which the operator does not take
            return query[..., : value.shape[-1]] * 0
        how: dict[str, Any] = {}
        if (mask := options["mask"]) is not None:
            how = {"atten_mask": ~mask, "sparse_mode": WHOLE_MASK, "inner_precise": ROWS_WITHOUT_KEYS}
        elif options["causal"]:
            how = {"atten_mask": _mask(query.device), "sparse_mode": RIGHT_DOWN_CAUSAL}
        return self._operator(
            *(one.contiguous() for one in (query, key, value)),
            head_num=query.shape[1],
            input_layout="BNSD",
            scale=options["scale"],
            keep_prob=1.0 - options["dropout"],
            **how,
        )[0]


def _sparsity(window: int | None, longest: int) -> dict[str, int]:
    if window is None or window >= longest:
        return {"sparse_mode": RIGHT_DOWN_CAUSAL}
    return {"sparse_mode": BAND, "pre_tockens": window - 1, "next_tockens": 0}


@lru_cache(maxsize=8)  # every layer has the same
def _calls(query_lengths: tuple[int, ...], key_lengths: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """The cumulative lengths of queries and keys for each call of the operator."""
    if any(keys < queries for queries, keys in zip(query_lengths, key_lengths, strict=True)):
        raise ValueError("a sequence has more queries than keys: its first queries would attend to nothing")
    starts = range(0, len(query_lengths), MOST_SEQUENCES)
    cut = [slice(start, start + MOST_SEQUENCES) for start in starts]
    return [(list(accumulate(query_lengths[piece])), list(accumulate(key_lengths[piece]))) for piece in cut]


@lru_cache(maxsize=8)
def _mask(device: torch.device) -> Tensor:
    """The compressed causal mask: True above the diagonal, where nothing may be seen."""
    return torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.bool, device=device).triu(1)


class Npu(TorchDevice[NpuConfig]):
    """One Ascend NPU of this process, through `torch.accelerator` wherever that is enough.

    Raises EnvironmentProblem where torch_npu finds no card.
    """

    name = "npu"

    def __init__(self, config: NpuConfig, *, decide: Decide) -> None:
        import torch_npu  # registers the device with torch

        # which torch_npu itself still uses, wherever a module is copied
        warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning, r"torch_npu\.")
        current = torch.accelerator.current_accelerator(check_available=True)  # else it is one without a card, too
        if current is None or current.type != "npu":
            refuse_hidden(config.kind, 0)
            raise EnvironmentProblem("device=npu: torch_npu is installed but finds no card; npu-smi info must list one")
        super().__init__(config, select_card(config.kind, torch.accelerator.device_count()), decide)
        self._operators: Any = torch_npu

    def describe(self) -> dict[str, Any]:
        """What exactness depends on."""
        npu = self._operators.npu
        return {"device": "npu", "card": npu.get_device_name(), "cann": npu.utils.get_cann_version()}

    def stats_readers(self) -> Sequence[StatsReader]:
        """Of the chip as npu-smi sees it, and of this process's allocator."""
        index = self.torch_device.index
        return npu_stats_reader(index, os.environ.get(VARIABLES["npu"])), self.allocator

    def unsupported_reason(self, dtype: torch.dtype) -> str | None:
        """bfloat16, where the card is older than A2."""
        if dtype != torch.bfloat16 or self._operators.npu.is_bf16_supported():
            return None
        return f"an {self._operators.npu.get_device_name()} has no bfloat16"

    def varlen_attention(self, dtype: torch.dtype) -> VarlenAttention | None:
        """npu_fusion_attention, which computes in float16, bfloat16 and float32."""
        if self.config.attention == "sdpa":
            return None
        self._decide.record_fact("attention", "fused", "npu_fusion_attention over packed batches")
        return FusionAttention(self._operators.npu_fusion_attention)

    def dense_attention(self) -> DenseAttention | None:
        """The same operator for rows side by side."""
        return None if self.config.attention == "sdpa" else DenseFusionAttention(self._operators.npu_fusion_attention)

    def apply_fused_ops(self, module: nn.Module, kernels: str | None = None) -> None:
        """Replace what of a transformers model has fused operators here."""
        super().apply_fused_ops(module, kernels)
        install_fused_ops(module, self.config.fused_ops, self._operators, self._decide)
