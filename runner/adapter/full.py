"""Full fine-tuning: every parameter learns."""

from __future__ import annotations

from typing import Protocol, TypeVar

from torch import nn

from runner.adapter.config import NoAdapterConfig
from runner.protocols import Decide


class HasModule(Protocol):
    """What this adapter needs of a model."""

    module: nn.Module


M = TypeVar("M", bound=HasModule)


def attach(config: NoAdapterConfig, model: M, *, decide: Decide) -> M:
    """The same model with all its parameters trainable."""
    model.module.requires_grad_(True)
    return model
