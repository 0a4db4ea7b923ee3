"""What the building of every model has in common: drawn weights, data type, device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
M = TypeVar("M", bound=nn.Module)


def drawn(make: Callable[[], M], seed: int) -> M:
    """`make()` with its random numbers from `seed`; the process's own stream is left as it was.

    Drawn on the CPU in float32, so that every device and data type starts from the same model.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def placed(module: M, dtype: torch.dtype, device: torch.device) -> M:
    """The same module with its parameters in `dtype` on `device`; buffers (rotary frequencies) keep their type."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    module.config.dtype = dtype
    return module.to(device)
