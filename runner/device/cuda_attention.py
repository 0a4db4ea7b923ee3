"""Variable-length attention on NVIDIA GPUs: by the package flash-attn, or torch's own flash kernel.

Both align queries with the last keys and take cumulative lengths, here with the leading 0, as int32 on the device.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from runner.core import torch_compat
from runner.core.errors import EnvironmentProblem
from runner.device.config import CudaConfig
from runner.interfaces import Decide, VarlenAttention

FLASH_TYPES = frozenset({torch.float16, torch.bfloat16})


class FlashAttention:
    """`VarlenAttention` by `function`, which is called like `flash_attn.flash_attn_varlen_func`."""

    def __init__(self, function: Callable[..., Any], deterministic: bool) -> None:
        self._function, self._deterministic = function, deterministic

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
        """See `VarlenAttention`."""
        out: Tensor = self._function(
            query,
            key,
            value,
            cumulative_lengths(query_lengths, query.device),
            cumulative_lengths(key_lengths, query.device),
            max(query_lengths),
            max(key_lengths),
            **self._options(window, dropout, scale, grouped=query.shape[1] != key.shape[1]),
        )
        return out

    def _options(self, window: int | None, dropout: float, scale: float, grouped: bool) -> dict[str, Any]:
        return {
            "dropout_p": dropout,
            "softmax_scale": scale,
            "causal": True,
            "window_size": (-1, -1) if window is None else (window - 1, 0),
            "deterministic": self._deterministic,
        }


class TorchFlashAttention(FlashAttention):
    """The same by `function`, called like `varlen_attn` of torch.nn.attention.varlen; it has no dropout.

    Raises EnvironmentProblem for a model whose attention has dropout.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function, deterministic=False)

    def _options(self, window: int | None, dropout: float, scale: float, grouped: bool) -> dict[str, Any]:
        if dropout:
            raise EnvironmentProblem(
                f"torch's own kernel for rows end to end has no dropout, and this model's attention has {dropout}\n"
                "  set device.attention=sdpa, or install flash-attn"
            )
        return {"scale": scale, "window_size": (-1 if window is None else window - 1, 0), "enable_gqa": grouped}


def varlen_kernel(config: CudaConfig, dtype: torch.dtype, decide: Decide) -> VarlenAttention | None:
    """The kernel that `device.attention` asks for, if this dtype has it; None = torch's, padded buckets."""
    if config.attention == "sdpa":
        return None
    found: tuple[VarlenAttention, str] | str = f"flash kernels compute in float16 and bfloat16, the model in {dtype}"
    if dtype in FLASH_TYPES:
        found = installed_kernel(config.deterministic)
    if isinstance(found, str):
        decide("attention", "fused", "sdpa", found.replace("torch.", ""))
        return None
    decide.record_fact("attention", "fused", found[1])
    return found[0]


def installed_kernel(deterministic: bool) -> tuple[VarlenAttention, str] | str:
    """The best kernel that is installed, and its name; or why there is none."""
    if importlib.util.find_spec("flash_attn") is not None:
        try:
            package = importlib.import_module("flash_attn")  # built for one torch and one CUDA, or it does not load
        except ImportError as error:
            return f"flash-attn is installed and cannot be loaded: {str(error).splitlines()[0]}"
        return FlashAttention(package.flash_attn_varlen_func, deterministic), f"flash-attn {package.__version__}"
    if (function := torch_compat.varlen_attention()) is not None:
        return TorchFlashAttention(function), "the flash kernel in torch"
    return f"flash-attn is not installed, and torch {torch.__version__} has no such kernel"


@lru_cache(maxsize=8)  # every layer asks for the same
def cumulative_lengths(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Where sequences begin and end: int32 [n + 1] on the device, which is not waited for."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device, non_blocking=True)
