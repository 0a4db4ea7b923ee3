"""Huawei Ascend NPUs as a device."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from runner.core.errors import EnvironmentProblem
from runner.device.base import TorchDevice, refuse_hidden, select_card
from runner.device.config import NpuConfig
from runner.device.device_kinds import VARIABLES
from runner.device.device_stats import StatsReader, npu_stats_reader
from runner.device.npu_attention import DenseFusionAttention, FusionAttention
from runner.device.npu_fused import install_fused_ops
from runner.interfaces import Decide, DenseAttention, VarlenAttention


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
            raise EnvironmentProblem("device=npu: torch_npu is installed and finds no card; npu-smi info must list one")
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
        self._decide.record_fact("attention", "fused", "npu_fusion_attention over rows end to end")
        return FusionAttention(self._operators.npu_fusion_attention)

    def dense_attention(self) -> DenseAttention | None:
        """The same operator for rows side by side."""
        return None if self.config.attention == "sdpa" else DenseFusionAttention(self._operators.npu_fusion_attention)

    def apply_fused_ops(self, module: nn.Module) -> None:
        """Exchange what of a transformers model has fused operators here."""
        install_fused_ops(module, self.config.fused_ops, self._operators, self._decide)
