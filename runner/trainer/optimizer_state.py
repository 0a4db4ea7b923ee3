"""The state of a learner in a checkpoint: parameters and the optimizer's state, by name.

    parameters, optimizer ──learner_state──▶ {"tensors": param/…, optim/<key>/…; "optimizer": the rest}
                            ──restore_learner_state──▶ the same

Sharded tensors are returned as they are: each rank writes its own shards. Loaded tensors are whole: each rank copies
its shards. A parameter of other ranks is on `meta` here: this rank neither returns nor loads it, but checks its name,
shape and type.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from runner.core.errors import CheckpointError, RunnerError
from runner.distributed.dtensor_utils import fill_local, shard_like
from runner.interfaces import State

Parameters = Mapping[str, nn.Parameter]  # those that learn, by name


def learner_state(parameters: Parameters, optimizer: torch.optim.Optimizer) -> State:
    """Tensors under `param/` and `optim/<key>/`, the rest plain; of the parameters that this rank has.

    Raises RunnerError for an optimizer that keeps state of no parameter, or under a name with a slash.
    """
    tensors = {f"param/{name}": p.detach() for name, p in parameters.items() if not p.is_meta}
    values: dict[str, dict[str, Any]] = {}
    own, names = optimizer.state_dict(), _names_by_index(parameters, optimizer)
    for index, entry in own["state"].items():
        if index not in names or any("/" in key for key in entry):
            raise RunnerError(f"{type(optimizer).__name__} keeps state under {index!r} that cannot be saved")
        for key, value in entry.items():
            if isinstance(value, Tensor):
                tensors[f"optim/{key}/{names[index]}"] = value
            else:
                values.setdefault(names[index], {})[key] = value
    groups = [{key: value for key, value in group.items() if key != "params"} for group in own["param_groups"]]
    return {"tensors": tensors, "optimizer": {"groups": groups, "values": dict(sorted(values.items()))}}


def restore_learner_state(parameters: Parameters, optimizer: torch.optim.Optimizer, state: State) -> None:
    """Restore a `learner_state`. Raises CheckpointError unless names and shapes are exactly the same."""
    load_parameters(parameters, state["tensors"])
    entries = _entries(parameters, state)
    own, saved = optimizer.state_dict(), state["optimizer"]["groups"]
    names = _names_by_index(parameters, optimizer)
    if len(saved) != len(own["param_groups"]) or entries.keys() - set(names.values()):
        raise CheckpointError("the checkpoint's optimizer has other parameter groups than this one")
    own["param_groups"] = [_restore_group(*pair) for pair in zip(own["param_groups"], saved, strict=True)]
    own["state"] = {index: entries[name] for index, name in names.items() if name in entries}
    optimizer.load_state_dict(own)


def load_parameters(parameters: Parameters, tensors: Mapping[str, Tensor]) -> None:
    """Copy the `param/` tensors into `parameters`. Raises CheckpointError unless names and shapes agree."""
    saved = {name.removeprefix("param/"): t for name, t in tensors.items() if name.startswith("param/")}
    differing = sorted(saved.keys() ^ parameters.keys())
    if differing:
        raise CheckpointError(f"the checkpoint and this model differ in {len(differing)} parameters: {differing[:5]}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            if parameter.shape != saved[name].shape or parameter.dtype != saved[name].dtype:
                raise CheckpointError(
                    f"{name}: {saved[name].dtype}{list(saved[name].shape)} in the checkpoint, "
                    f"{parameter.dtype}{list(parameter.shape)} in this model"
                )
            if not parameter.is_meta:
                fill_local(parameter, saved[name])


def _entries(parameters: Parameters, state: State) -> dict[str, dict[str, Any]]:
    """Optimizer state of each parameter on this rank, and of any that the model does not have."""
    elsewhere = {name for name, parameter in parameters.items() if parameter.is_meta}
    entries = {name: dict(kept) for name, kept in state["optimizer"]["values"].items() if name not in elsewhere}
    for full, tensor in state["tensors"].items():
        kind, _, rest = full.partition("/")
        key, _, name = rest.partition("/")
        if kind == "optim" and name not in elsewhere:
            entries.setdefault(name, {})[key] = _local_copy(parameters.get(name), tensor)
    return entries


def _local_copy(parameter: nn.Parameter | None, saved: Tensor) -> Tensor:
    """A copy of what the optimizer keeps of a parameter, as far as this rank holds it."""
    alike = parameter is not None and parameter.shape == saved.shape
    return shard_like(parameter, saved) if parameter is not None and alike else saved.clone()


def _names_by_index(parameters: Parameters, optimizer: torch.optim.Optimizer) -> dict[int, str]:
    """The names of the parameters by the numbers they have in the optimizer's state."""
    names = {id(p): name for name, p in parameters.items()}
    ordered = (p for group in optimizer.param_groups for p in group["params"])
    return {index: names[id(p)] for index, p in enumerate(ordered)}


def _restore_group(group: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group with the saved values; JSON has made lists of its tuples."""
    return {**group, **{k: tuple(v) if isinstance(group.get(k), tuple) else v for k, v in saved.items()}}
