"""Where tensors live, and how a decision is said."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class VarlenAttention(Protocol):
    """Causal attention within sequences that lie end to end, by a kernel of a device's own.

    query [Q, heads, d]; key, value [K, kv heads, d], all of one data type and on the device; returns [Q, heads, d].
    Sequence i has query_lengths[i] queries, which are the last of its key_lengths[i] tokens: query q of it sees the
    keys up to its own, and with a window only the last `window` of those, its own included.
    """

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
    ) -> Tensor: ...


class DenseAttention(Protocol):
    """Attention of rows side by side, by a kernel of a device's own.

    query [B, heads, S, d]; key, value [B, kv heads, L, d], all of one data type and on the device; returns
    [B, heads, S, d]. mask: bool [B, 1 or heads, S, L], True = seen, or None: then every key is seen, or with `causal`,
    where S = L, those up to the query's own. The output is 0 where a query sees nothing.
    """

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Tensor | None,
        causal: bool,
        dropout: float,
        scale: float,
    ) -> Tensor: ...


class Device(Protocol):
    """Where tensors live, and which kernels run on them."""

    name: str
    torch_device: torch.device  # of this process, among those of its machine
    backend: str  # of process groups: "cpu:gloo,npu:hccl"

    def prepare(self) -> None: ...  # threads, determinism, current device

    def synchronize(self) -> None: ...

    def peak_memory_bytes(self) -> int: ...

    def describe(self) -> dict[str, Any]: ...

    # each tells, by name, what the device is doing now: busy, temperature, memory; may take a second
    def stats_readers(self) -> Sequence[Callable[[], Mapping[str, float]]]: ...

    # what matrix products of `dtype` are computed in: a data type, or tf32
    def matmul_precision(self, dtype: torch.dtype) -> str: ...

    def unsupported_reason(
        self, dtype: torch.dtype
    ) -> str | None: ...  # why it cannot compute with it; None where it can

    def varlen_attention(self, dtype: torch.dtype) -> VarlenAttention | None: ...  # None: torch's own, row by row

    def dense_attention(self) -> DenseAttention | None: ...  # None: the model's own, through transformers

    def apply_fused_ops(
        self, module: torch.nn.Module
    ) -> None: ...  # exchange what of a transformers model has fused operators


class Decide(Protocol):
    """Records an automatic decision: printed, in the manifest, an error under strict=true.

    Where `got` is what was wanted it is a fact, which strict=true allows; `state` says one.
    """

    def __call__(self, feature: str, wanted: str, got: str, reason: str) -> None: ...

    def record_fact(self, feature: str, value: str, reason: str) -> None: ...
