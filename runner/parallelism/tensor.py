"""A model whose layers lie in slices on several devices (tensor parallelism; Shoeybi et al., 1909.08053, section 3).

    hidden ──▶ q k v, gate up: some heads, some features of each rank ──▶ o, down ──summed over ranks──▶ hidden
    ids    ──▶ embedding: the rows of some ids ──summed──▶ hidden ──▶ LM head: their logits (runner.model.vocabulary)

Everything else (norms, routers, experts, heads of one number) is whole on every rank and computes the same there.
Low-rank adapters are cut with their layers: where outputs are sliced, B is; where inputs are, A is, and what they add
is summed with the layer's own. The other one of the two is whole, and each rank finds a part of its gradient, like that
of the norms between q and the heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from runner.core.errors import Problem, SpecError
from runner.interfaces import Decide
from runner.parallelism.slices import Plan, Slices, Use, UseRows, distribute

OUTPUTS, INPUTS = 0, 1  # the dimensions of a linear layer's weight
LAYERS = (
    {"q_proj": OUTPUTS, "k_proj": OUTPUTS, "v_proj": OUTPUTS, "o_proj": INPUTS},
    {"gate_proj": OUTPUTS, "up_proj": OUTPUTS, "down_proj": INPUTS},
)


class Sliceable(Protocol):
    """What is needed of a model."""

    whole: Any
    inner: Any

    # embedding and LM head, if the rows of some ids are all that is needed for these
    def ends(self) -> list[Any]: ...


def cut(model: Sliceable, mesh: DeviceMesh, *, decide: Decide) -> None:
    """Make of every parameter of `model`, on the meta device (see `weights`), the slice of it that this rank holds, or
    a replica.

    mesh: of one dimension. `probed.refuse_another` follows, when the slices have their numbers. The model's parameters
    are other objects afterwards. Raises SpecError, on all ranks, for a model that has no such layers.
    """
    slices, plan = Slices(mesh), Plan()
    for layer, dims in _layers(model.inner):
        _cut_layer(layer, dims, slices, plan)
    ends = _ends(model, slices, decide)
    plan |= {id(end._parameters["weight"]): OUTPUTS for end in ends}
    distribute(model.whole.modules(), slices, plan)
    for part in model.whole.modules():
        if isinstance(part, nn.ParameterDict | nn.ParameterList) and part._parameters:
            raise refused(f"{type(part).__name__} of parameters that no module computes with alone")
        if part in ends and isinstance(part, nn.Embedding):
            UseRows(part, slices)
        elif part not in ends and part._parameters:
            Use(part, slices)
    model.whole.joined = partial(slices.whole, model.whole)


def refused(why: str) -> SpecError:
    return SpecError([Problem("parallelism.tp", f"{why}; type parallelism.tp=1, with parallelism=ddp or fsdp")])


def _layers(module: nn.Module) -> Iterator[tuple[nn.Module, dict[str, int]]]:
    """Attention and feed-forward layers, and how what is in them is cut."""
    found = [(part, dims) for part in module.modules() for dims in LAYERS if all(hasattr(part, name) for name in dims)]
    if not found:
        raise refused(f"{type(module).__name__} has no layers named {', '.join(LAYERS[0] | LAYERS[1])}")
    yield from found


def _cut_layer(layer: nn.Module, dims: dict[str, int], slices: Slices, plan: Plan) -> None:
    """Say how a layer's weights are cut, and let hidden states enter and leave its slices."""
    for name, dim in dims.items():
        linear = getattr(layer, name)
        for one, cut in _weights(linear, dim):
            if cut is not None:
                plan[id(one._parameters["weight"])] = cut
            if one.bias is not None and cut == OUTPUTS:
                plan[id(one._parameters["bias"])] = 0
            elif one.bias is not None:
                slices.once.add((one, "bias"))
        if dim == INPUTS:
            linear.register_forward_hook(lambda part, inputs, output: slices.leave(output))
    for part in layer.modules():
        own = [name for name, parameter in part._parameters.items() if parameter is not None]
        slices.partial |= {(part, name) for name in own if id(part._parameters[name]) not in plan} - slices.once
    layer.register_forward_pre_hook(partial(_entering, slices), with_kwargs=True)


def _weights(linear: nn.Module, dim: int) -> Iterator[tuple[Any, int | None]]:
    """The matrices of a linear layer, its adapters among them, and the dimension in which each is cut."""
    base = getattr(linear, "base_layer", linear)
    if getattr(type(base), "forward", None) is not nn.Linear.forward:  # of its own class, or one that casts weights
        raise refused(f"a layer of type {type(base).__name__} is not known to be cut")
    yield base, dim
    if base is not linear:
        adapters: Any = linear
        yield from ((one, None if dim == OUTPUTS else INPUTS) for one in adapters.lora_A.values())
        yield from ((one, OUTPUTS if dim == OUTPUTS else None) for one in adapters.lora_B.values())


def _entering(slices: Slices, part: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Hidden states come first, or by name."""
    if inputs:
        return (slices.enter(inputs[0]), *inputs[1:]), keywords
    return inputs, keywords | {"hidden_states": slices.enter(keywords["hidden_states"])}


def _ends(model: Sliceable, slices: Slices, decide: Decide) -> set[Any]:
    """Of embedding and LM head what is cut by ids."""
    ends = model.ends()
    if rows := [len(end.weight) for end in ends if len(end.weight) % slices.size]:
        text = f"{rows[0]} ids do not divide into {slices.size}"
        decide("parallelism.tp", "embedding and LM head in slices", "whole on every rank", text)
        return set()
    return set(ends)
