"""A step of torch's fused AdamW that clips and skips in the kernel, so the host reads nothing.

A gradient that is not finite is skipped. The kernel divides gradients by `grad_scale` as it reads them, so clipping
costs one more write of the gradients, also where it changes nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def can_skip(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the kernel is known to do so: on a GPU, which the host would wait for."""
    groups = optimizer.param_groups if type(optimizer) is torch.optim.AdamW else []  # a subclass has a step of its own
    return bool(groups) and all(group["fused"] and p.is_cuda for group in groups for p in group["params"])


def step_if_finite(optimizer: Any, norm: Tensor, max_norm: float | None) -> None:
    """Step with gradients of total norm `norm`, clipped to `max_norm`; if it is not finite, do nothing."""
    optimizer.found_inf = (~torch.isfinite(norm)).float()
    if max_norm is not None:
        optimizer.grad_scale = ((norm + 1e-6) / max_norm).clamp(min=1).float()
    try:
        optimizer.step()
    finally:
        optimizer.found_inf = optimizer.grad_scale = None
