"""A sharded model put together on the CPU of one rank, so that it can be written like any other: an adapter, or a
model that an adapter is merged into. What is a model by itself is written tensor by tensor (`streamed`).

pieces on every rank ──tensor by tensor──▶ whole on one rank's CPU, nowhere else ──▶ a module without pieces
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from runner.shards import whole


def gathered_on_cpu(module: Any, *, keep: bool, base: bool) -> dict[str, Tensor]:
    """All parameters and kept buffers of a peft model by name, tied ones as one tensor; empty where not `keep`; what is
    no part of the adapter without values, on `meta`, if not `base`. Collective."""
    tensors = module.state_dict(keep_vars=True)
    wanted = {id(tensor) for tensor in (tensors if base else adapter_of(module, tensors)).values()}
    found = blanks(tensors) if keep else {}
    known: dict[int, Tensor] = {}
    for name, tensor in tensors.items():
        if id(tensor) not in wanted:
            continue
        if id(tensor) not in known:
            full = whole(tensor)
            known[id(tensor)] = full.cpu() if keep else full.new_empty(0)
        if keep:
            found[name] = known[id(tensor)]
    return found


def adapter_of(module: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those of a peft model's tensors that peft writes, under the names that it writes."""
    from peft import get_peft_model_state_dict

    made: dict[str, Tensor] = get_peft_model_state_dict(
        module, state_dict=tensors, adapter_name=module.active_adapter, save_embedding_layers=False
    )
    return made


def blanks(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of the same types and shapes on `meta`, tied ones as one; parameters as such."""
    made: dict[int, Tensor] = {}
    for tensor in tensors.values():
        if id(tensor) not in made:
            shape = getattr(tensor, "ds_shape", tensor.shape)  # of what DeepSpeed has taken away for a while
            blank = torch.empty(shape, dtype=tensor.dtype, device="meta")
            made[id(tensor)] = nn.Parameter(blank, False) if isinstance(tensor, nn.Parameter) else blank
    return {name: made[id(tensor)] for name, tensor in tensors.items()}


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
            warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys", RuntimeWarning)
            made = peft.get_peft_model(made, module.peft_config[module.active_adapter], low_cpu_mem_usage=True)
    made.load_state_dict(tensors, assign=True)
    made.tie_weights()
    return made
