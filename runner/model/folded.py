"""Low-rank adapters folded into the weights for as long as nothing learns: one matrix product instead of three."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

EXACT = (torch.float32, torch.float64)  # in bfloat16 a small adapter would be lost in the rounding of the sum


@contextmanager
def folded(module: nn.Module) -> Iterator[None]:
    """Inside the block `module` computes the same, up to rounding, without its adapters; outside, what it was.

    The adapted weights exist twice meanwhile, and the first ones come back bit for bit. Nothing happens to a module
    without adapters, or where folding is not the same: coarse weights, or weights that another layer shares.
    """
    layers = _adapted(module)
    bases = [p for layer in layers for p in layer.get_base_layer().parameters()]
    shares = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
    if not layers or any(p.dtype not in EXACT or shares[id(p)] > 1 for p in bases):
        yield
        return
    kept: list[Tensor] = [p.data for p in bases]
    try:
        for p in bases:
            p.data = p.data.clone()
        for layer in layers:
            layer.merge()
        yield
    finally:
        for layer in layers:
            if layer.merged:
                layer.unmerge()  # for peft's books; its weights are a rounding away from the first ones
        for p, data in zip(bases, kept, strict=True):
            p.data = data


def _adapted(module: nn.Module) -> list[Any]:
    if not hasattr(module, "get_base_model"):
        return []
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]
