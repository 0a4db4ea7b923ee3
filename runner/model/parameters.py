"""How a model's parameters are stored, cast when read, and gathered when sharded.

                          stored                            computes in
    frozen                compute type                      compute type
    trainable             float32                           compute type
    routers, score heads  float32                           float32
    LM head               as the others                     compute type, or model.head_dtype

A parameter that is stored in another type than it computes in is cast each time a module reads it (`module.weight`),
differentiably; its gradient comes back in the type that it is stored in. Nothing keeps the cast beyond the operator
that reads it, but for what that operator itself saves for its backward pass: layers that are recomputed save none, and
fully_shard gathers in the compute type, so that there is nothing to cast. An embedding looks its rows up as they are
stored and casts those. Nothing happens here to a model that computes in what it is stored in.

    whole.run(work) ──▶ embedding, norm, head gathered ──▶ work: layer by layer gathered, used, freed ──▶ outputs
    whole.gathered()    everything gathered for a while: any number of passes, and on no rank as many as on another

Pieces are those of torch's fully_shard (FSDP2), which hangs on the forward of modules; ours are used from outside of
their forward too, the LM head's weight in chunks. Hence one module around all, whose forward is whatever has to be
done. Layers that are cut (runner.parallelism.tensor_parallel) stay cut in a pass, and are joined where all is gathered.
A model that is not sharded passes through unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

ROUTERS = ("router", "gate")  # names of routers beside a layer's `experts`
HEADS = ("score", "value_head")  # of one number


def cast_on_read(module: nn.Module, compute: torch.dtype) -> None:
    """Let the modules of `module` compute in `compute`, whatever type their parameters are stored in.

    `float32_modules` compute in float32. A module that was prepared before is examined again.
    """
    wide = {id(inner) for part in float32_modules(module) for inner in part.modules()}
    for part in module.modules():
        names = tuple(name for name, p in part._parameters.items() if p is not None and p.is_floating_point())
        dtype = torch.float32 if id(part) in wide else compute
        types = {part._parameters[name].dtype for name in names}  # type: ignore[union-attr]
        if not names or types == {dtype}:
            continue
        if isinstance(part, nn.Embedding):
            if not any(hook is _cast_rows for hook in part._forward_hooks.values()):
                part.register_forward_hook(_cast_rows)
            part._compute_type = dtype  # type: ignore[assignment]
        else:
            kind: Any = original_class(part)
            part.__class__ = _casting_class(kind, names, dtype)
    for part in float32_modules(module):
        if not any(hook is cast_inputs_to_float32 for hook in part._forward_pre_hooks.values()):
            part.register_forward_pre_hook(cast_inputs_to_float32)
    for name, part in module.named_modules():
        # peft casts what goes into an adapter's matrices to what these are stored in where they are sharded
        matrices = part.children() if name.endswith((".lora_A", ".lora_B")) else ()
        for inner in (part._modules.get("experts"), *matrices):
            if inner is not None and not any(hook is _cast_input for hook in inner._forward_pre_hooks.values()):
                inner._compute_type = compute
                inner.register_forward_pre_hook(_cast_input)


def float32_modules(module: nn.Module) -> list[nn.Module]:
    """The modules that compute in float32: MoE routers, heads of one number, and marked ones.

    Marked with `computes_in_float32`, as an LM head is by `model.head_dtype`.
    """
    found: list[nn.Module] = []
    for part in module.modules():
        children = part._modules
        names = [*(ROUTERS if "experts" in children else ()), *HEADS]
        found += [child for name in names if (child := children.get(name)) is not None]
    return [*found, *(part for part in module.modules() if getattr(part, "computes_in_float32", False))]


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module, without what `cast_on_read` made of it."""
    kind = type(module)
    return getattr(kind, "_original_class", kind)


def read_as_stored(module: nn.Module) -> None:
    """Undo the casts of `cast_on_read`, for who computes with the parameters themselves."""
    for part in module.modules():
        part.__class__ = original_class(part)


def stored_parameter(module: nn.Module, name: str) -> Any:
    """A module's parameter as it is stored; None = it has none."""
    return module._parameters[name]


def is_tied(one: nn.Module | None, other: nn.Module) -> bool:
    """Whether two modules store the same parameter."""
    return one is not None and any(p is not None and p is q for p in one.parameters() for q in other.parameters())


@contextmanager
def cache_casts(module: nn.Module) -> Iterator[None]:
    """Keep casts inside the block: for many passes without gradient between which no parameter changes."""
    casting = [part for part in module.modules() if hasattr(type(part), "_original_class")]
    with torch.no_grad():
        for part in casting:
            part.__dict__["_casts"] = {name: getattr(part, name) for name in type(part)._cast_names}  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for part in casting:
            part.__dict__.pop("_casts", None)


@cache
def _casting_class(kind: Any, names: tuple[str, ...], dtype: torch.dtype) -> type[nn.Module]:
    """A class like `kind` whose parameters `names` are read in `dtype`."""
    members: dict[str, Any] = {name: _casting_property(name, dtype) for name in names}
    members |= {"__module__": kind.__module__, "_original_class": kind, "_cast_names": names}
    return type(kind.__name__, (kind,), members)


def _casting_property(name: str, dtype: torch.dtype) -> property:
    def read(module: nn.Module) -> Tensor | None:
        if (kept := module.__dict__.get("_casts")) is not None:
            return kept[name]
        parameter = module._parameters[name]
        if parameter is None or isinstance(parameter, DTensor):  # which fully_shard reads; nothing computes with it
            return parameter
        return parameter.to(dtype)

    return property(read)


def _cast_rows(embedding: nn.Module, inputs: Any, rows: Tensor) -> Tensor:
    dtype: Any = embedding._compute_type
    return rows.to(dtype)


def cast_inputs_to_float32(part: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Inputs of floating-point numbers in float32."""
    return tuple(one.float() if isinstance(one, Tensor) and one.is_floating_point() else one for one in inputs)


def _cast_input(part: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Cast the first input, hidden states, to the compute type.

    Some families weigh what goes into experts with the router's scores before.
    """
    dtype: Any = part._compute_type
    return (inputs[0].to(dtype), *inputs[1:]) if inputs else inputs


T = TypeVar("T")


class FsdpRoot(nn.Module):
    """The module, and what learns beside it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        # the sharded parts whose weights are freed between their forward and their backward pass
        self.resharded: frozenset[Any] = frozenset()
        # whether only the last backward pass of a mini-batch sums gradients over the ranks
        self.accumulates_gradients = False
        # undoes for a while what cuts the layers
        self.join_context: Callable[[], AbstractContextManager[None]] = nullcontext
        self._inside = 0

    @property
    def is_sharded(self) -> bool:
        """Whether each rank holds a part of it only."""
        return any(isinstance(parameter, DTensor) or parameter.is_meta for parameter in self.parameters())

    def forward(self, work: Callable[[], T]) -> T:
        """What `work` gives."""
        return work()

    def run(self, work: Callable[[], T]) -> T:
        """What `work` gives, tensors or containers of them, with the parameters there that it uses.

        Collective where the model is sharded, its backward pass too: each rank runs as many passes as the others.
        """
        made: T = self(work)
        if not (self._inside or torch.is_grad_enabled()):  # else the backward pass needs what is gathered, and frees it
            self._reset_fsdp_iteration()
        return made

    def _reset_fsdp_iteration(self) -> None:
        if isinstance(self, FSDPModule):
            from runner.core import torch_compat

            torch_compat.reset_iteration_state(self)

    @contextmanager
    def summon_full_params(self) -> Iterator[None]:
        """The whole model on every rank inside the block, for passes without gradient.

        Ranks may run different numbers of passes. Collective on both ends; a block inside another changes nothing.
        """
        parts = [] if self._inside else [part for part in self.modules() if isinstance(part, FSDPModule)]
        joined = nullcontext if self._inside else self.join_context
        self._inside += 1
        try:
            for part in parts:
                _set_reshard_after_forward(part, False)
                part.unshard()
            with joined():
                yield
        finally:
            self._inside -= 1
            if parts:
                self._reset_fsdp_iteration()
            for part in parts:
                _set_reshard_after_forward(part, part in self.resharded)


def _set_reshard_after_forward(part: FSDPModule, value: bool) -> None:
    from runner.core import torch_compat

    torch_compat.reshard_after_forward(part, value)
