"""AdamW from torch, fused where the device has the kernel.

On an NPU it is torch's interface to the kernel, and not torch_npu's NpuFusedAdamW: that one lays all gradients in one
tensor, which it fills with zeros instead of giving it back, and replaces the state that a checkpoint reads.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from runner.optimizer.config import AdamWConfig
from runner.optimizer.groups import decay_groups
from runner.protocols import Decide

FUSED_DEVICES = frozenset({"cpu", "cuda", "npu"})


def build(config: AdamWConfig, *, parameters: Mapping[str, nn.Parameter], decide: Decide) -> torch.optim.Optimizer:
    """The optimizer over `parameters` (name → parameter)."""
    kinds = {p.device.type for p in parameters.values() if not p.is_meta}
    fused = config.fused and kinds <= FUSED_DEVICES
    if config.fused and not fused:
        decide("optimizer", "fused AdamW", "foreach AdamW", f"torch has no fused kernel for {', '.join(sorted(kinds))}")
    if fused and "npu" in kinds:
        decide.state("optimizer", "fused AdamW", "torch's own interface to the kernel, which keeps gradients apart")
    groups = decay_groups(parameters, config.weight_decay)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused or None)
