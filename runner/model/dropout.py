"""Dropout of a transformers or peft model, switched off for good."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.dropout import _DropoutNd


def switch_off(module: nn.Module) -> float:
    """Let training mode drop nothing: neither activations, attention, adapters' inputs nor whole layers.

    Returns the largest rate there was. Models keep rates in dropout modules, or in numbers of their own that are named
    after it (attention_dropout, attn_pdrop, layerdrop, …).
    """
    rates = [0.0]
    for part in module.modules():
        names = ["p"] if isinstance(part, _DropoutNd) else [n for n, v in vars(part).items() if _is_rate(n, v)]
        rates += [getattr(part, name) for name in names]
        for name in names:
            setattr(part, name, 0.0)
    return max(rates)


def _is_rate(name: str, value: object) -> bool:
    return "drop" in name and isinstance(value, float)
