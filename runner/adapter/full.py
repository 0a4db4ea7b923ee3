"""Full fine-tuning: every parameter learns."""

from __future__ import annotations

from runner.adapter.config import NoAdapterConfig
from runner.model.causal import CausalLM
from runner.protocols import Decide


def attach(config: NoAdapterConfig, model: CausalLM, *, decide: Decide) -> CausalLM:
    """The same model with all its parameters trainable."""
    model.module.requires_grad_(True)
    return model
