"""A sharded model put together on the CPU of one rank, so that it can be written like any other.

pieces on every rank ──tensor by tensor──▶ whole on one rank's CPU, nowhere else ──▶ a module without pieces
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from runner.shards import whole


def gathered_on_cpu(module: nn.Module, *, keep: bool) -> dict[str, Tensor]:
    """All parameters and kept buffers by name, tied ones as one tensor; empty where not `keep`. Collective."""
    found: dict[str, Tensor] = {}
    known: dict[int, Tensor] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in known:
            full = whole(tensor)
            known[id(tensor)] = full.cpu() if keep else full.new_empty(0)
        if keep:
            found[name] = known[id(tensor)]
    return found


def rebuilt(module: Any, inner: Any, tensors: dict[str, Tensor]) -> Any:
    """A module like `module`, which is the transformers model `inner` or a peft model around it, of these tensors."""
    with torch.device("meta"):
        made: Any = type(inner)(inner.config)
    made.generation_config = inner.generation_config
    if hasattr(inner, "_weight_conversions"):  # transformers renames and cuts some weights when they are loaded
        made._weight_conversions = inner._weight_conversions
    if module is not inner:
        import peft

        with warnings.catch_warnings():  # as where the adapter is made first
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            made = peft.get_peft_model(made, module.peft_config[module.active_adapter], low_cpu_mem_usage=True)
    made.load_state_dict(tensors, assign=True)
    made.tie_weights()
    return made
