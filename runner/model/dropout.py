"""Dropout of a transformers or peft model, switched off for good."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.modules.dropout import _DropoutNd


def largest(module: nn.Module) -> float:
    """The largest rate of dropout that there is: of activations, attention, adapters' inputs or whole layers."""
    return max((getattr(part, name) for part, name in _rates(module)), default=0.0)


def switch_off(module: nn.Module) -> None:
    """Let training mode drop nothing."""
    for part, name in list(_rates(module)):
        setattr(part, name, 0.0)


def _rates(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Where models keep rates: in dropout modules, or in numbers of their own that are named after it
    (attention_dropout, attn_pdrop, layerdrop, …)."""
    for part in module.modules():
        names = ["p"] if isinstance(part, _DropoutNd) else [n for n, v in vars(part).items() if _is_rate(n, v)]
        yield from ((part, name) for name in names)


def _is_rate(name: str, value: object) -> bool:
    return "drop" in name and isinstance(value, float)
