"""The gradients of a first update, whole, whoever keeps them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed

from runner.distributed.dtensor_utils import full_tensor


def noting(role: str, learner: Any, first: dict[str, Any]) -> None:
    """Keep the gradients of a learner's first update, as its optimizer sees them, under `role` and their names."""
    names = {id(parameter): f"{role}{name}" for name, parameter in learner.model.trainable().items()}
    zero = getattr(learner, "_zero", None)

    def note(*_: Any) -> None:
        for parameter in learner.model.trainable().values():
            if parameter.grad is not None:
                first.setdefault(names[id(parameter)], full_tensor(parameter.grad).clone())

    def note_zero(*_: Any) -> None:
        for parameters, flat in zero._groups():
            for parameter in parameters if flat.grad is not None else ():
                if names[id(parameter)] not in first:
                    first[names[id(parameter)]] = _put_together(zero, parameter, flat.grad)

    learner.optimizer.register_step_pre_hook(note if zero is None else note_zero)


def _put_together(zero: Any, parameter: Any, flat: Tensor) -> Tensor:
    """A parameter's gradient, of which each rank has a part in `flat`."""
    if zero._stage == 2:
        full, held = torch.zeros(parameter.numel()), parameter._hp_mapping
        if held is not None:
            there, here = held.lp_fragment_address, held.hp_fragment_address
            full[there.start : there.start + there.numel] = flat[here.start : here.start + here.numel]
        distributed.all_reduce(full)
        return full.view(parameter.shape)
    _, offset, size = zero._zero.grad_position[zero._zero.get_param_id(parameter)]
    parts = [torch.empty(int(size)) for _ in range(distributed.get_world_size())]
    distributed.all_gather(parts, flat.narrow(0, int(offset), int(size)).contiguous())
    return torch.cat(parts)[: parameter.ds_numel].view(parameter.ds_shape)
