"""Activation checkpointing and torch.compile of decoder layers in training.

    full        what goes into the layer is kept                     (Chen et al., 1604.06174)
    every n-th  the same in layers 0, n, 2n, …; the others keep everything
    selective   that, what attention gives and every second matrix product  (Korthikanti et al., 2205.05198, section 5,
                keep all but attention; attention's kernels keep no scores, so recomputing attention is expensive here)

    layer ──▶ compiled once for all layers of its kind and for any number of tokens; recomputing is part of its graph
                └── attention over rows end to end is one operator of the graph (`attention_operator`), or a kernel's

Legend: k inner size of a matrix product, n columns of what it gives. transformers runs its layers through the function
that is set here, in training mode. Dropout draws the same numbers in both passes, so that no gradient is another.
What is gathered (FSDP2) happens around the graph. Routers that count or replay their experts, adapters of routers and
experts, and attention with dropout but without a kernel, break it. Text is written by what is not compiled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from runner.core.errors import EnvironmentProblem
from runner.interfaces import Decide
from runner.model.attention_operator import define_packed_attention
from runner.model.router_replay import find_routers

OPTION, OFFLOADING = "model.gradient_checkpointing", "model.activation_offloading"
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
NARROW = 16  # times: adapters and routers are this much narrower on one side, and quickly made again
DRAWS = {"dropout_p": 0.0, "p_dropout": 0.0, "keep_prob": 1.0}  # an operator's arguments, and where it draws nothing
CheckpointingMode = bool | int | str  # of model.gradient_checkpointing


def enable_checkpointing(inner: Any, mode: CheckpointingMode, *, offload: bool, decide: Decide) -> None:
    """Let the layers of the transformers model `inner` keep less from now on.

    mode: true = all layers in full, n = every n-th, "selective"; offload: what is kept of a layer's input waits on the
    host, which with `selective` is not all there is. `decide` records a model that cannot do so.
    """
    if not inner.supports_gradient_checkpointing:
        reason = f"{type(inner).__name__} does not support it"
        decide(OPTION, _option_text(mode), "false", reason)
        if offload:
            decide(OFFLOADING, "true", "false", reason)
        return
    # the older name, until transformers 5.5 is no longer supported
    enable = getattr(inner, "activation_checkpointing_enable", None) or inner.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    layers = [part for part in inner.modules() if isinstance(part, GradientCheckpointingLayer)]
    reason = f"{type(inner).__name__} does not expose its layers"
    if not layers and mode is not True:
        decide(OPTION, _option_text(mode), "true", reason)
    if not layers and offload:
        decide(OFFLOADING, "true", "false", reason)
    run: Any = partial(checkpoint, use_reentrant=False)
    if mode == "selective":
        run = partial(run, context_fn=lambda: create_selective_checkpoint_contexts(SelectivePolicy()))
    if offload:
        run = partial(_run_offloaded, run)
    every = mode if isinstance(mode, int) else 1  # true is 1
    for place, layer in enumerate(layers):
        layer._gradient_checkpointing_func = run
        layer.gradient_checkpointing = place % every == 0


def _option_text(mode: CheckpointingMode) -> str:
    return str(mode).lower()


def _run_offloaded(run: Callable[..., Any], layer: Callable[..., Any], *inputs: Any) -> Any:
    """`run(layer, *inputs)`, which saves the inputs, with these on the host until the backward pass."""
    kind = next(one for one in inputs if isinstance(one, Tensor)).device.type
    with _save_on_host(kind):
        return run(layer, *inputs)


def _save_on_host(kind: str) -> AbstractContextManager[Any]:
    if kind == "meta":  # where nothing can be copied from: it only is no longer there
        return saved_tensors_hooks(lambda tensor: (tensor.shape, tensor.dtype), lambda kept: _empty(*kept))
    return save_on_cpu(pin_memory=kind != "cpu", device_type=kind)


def _empty(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


class SelectivePolicy:
    """Which results of one layer's operators are kept.

    Of the matrix products the second, fourth, …: the first of a layer are cheap to make again from its input, and the
    last one, the seventh of a Llama, is read by no backward pass. torchtitan keeps the others of them.
    """

    def __init__(self) -> None:
        self._products = Counter[bool]()  # counted by pass; torch 2.13 calls it in the first one only

    def __call__(
        self, context: SelectiveCheckpointContext, operator: Any, *arguments: Any, **named: Any
    ) -> CheckpointPolicy:
        """See `create_selective_checkpoint_contexts`."""
        keep = _is_attention(operator, arguments, named)
        if operator in PRODUCTS and _is_wide(arguments[-1]):
            self._products[context.is_recompute] += 1
            keep = self._products[context.is_recompute] % 2 == 0
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _is_wide(weight: Tensor) -> bool:
    k, n = weight.shape
    return max(k, n) < NARROW * min(k, n)


def _is_attention(operator: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Whether it is an attention kernel that need not run again in the backward pass.

    One that draws random numbers has to run again, or later operators would draw other numbers.
    """
    if "attention" not in (name := str(operator)) and "attn" not in name:
        return False
    names = [one.name for one in operator._schema.arguments]
    given = dict(zip(names, arguments, strict=False)) | named
    return all(given.get(name, nothing) == nothing for name, nothing in DRAWS.items())


GRAPHS = 16  # of a layer's code: with and without gradient, recomputed or not, each kind of layer; torch's limit is 8
OPTIONS: dict[str, Any] = {
    "dynamic": True,
    "options": {"fallback_random": True},  # dropout draws what it draws without
}


def compile_layers(model: Any, decide: Decide) -> CompiledLayers | None:
    """Compile the layers of a `TransformersModel` with its adapter; None where they stay as they are.

    `decide` records what is done where `model.compile` is left out, and why `model.compile=true` is not possible.
    Raises EnvironmentProblem where it is true and torch has no compiler.
    """
    layers, is_default = model.transformer_blocks(), model.config.compile is None
    objection = _layers_objection(model, layers) or (_default_objection(model) if is_default else None)
    problem = None if objection else compiler_problem(model.device, model.compute_dtype)
    if is_default:
        reason = objection or problem
        text = f"the default on {model.device.type}; type model.compile=false to turn it off"
        decide.record_fact("model.compile", "false" if reason else "true", reason or text)
    elif objection is not None:
        decide("model.compile", "true", "false", objection)
    elif problem is not None:
        raise EnvironmentProblem(f"model.compile=true: {problem}, or leave it out")
    return None if objection or problem else CompiledLayers(layers)


def _layers_objection(model: Any, layers: Sequence[nn.Module]) -> str | None:
    """Why the layers of a model, with its adapter, stay as they are; None = they can be compiled."""
    if not layers:
        return f"{type(model.inner).__name__} does not declare its layer classes"
    on_experts = any(isinstance(part, ParamWrapper) for layer in layers for part in layer.modules())
    if on_experts and model.config.gradient_checkpointing:
        return "a recomputed layer with an adapter on experts is not one graph"
    return None


def _default_objection(model: Any) -> str | None:
    """Why the layers stay as they are unless `model.compile=true`; None = nothing is known."""
    if model.config.gradient_checkpointing and find_routers(model.inner):
        return "routers of layers that are recomputed and compiled would be neither counted nor replayed"
    if model.layout != "packed":
        return f"the layers of {type(model.inner).__name__} with padded rows are not tested with torch.compile"
    return None


class CompiledLayers:
    """Some layers, which compute by what torch has compiled from now on."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        """Prepare the layers; nothing is compiled before it runs.

        Adapters and the device's operators must be installed before.
        """
        define_packed_attention()
        torch._dynamo.config.recompile_limit = GRAPHS
        torch.fx.experimental._config.use_duck_shape = False  # as many rows as a head is wide are no constant
        self._layers: list[Any] = list(layers)
        self._compiled = [torch.compile(layer.forward, **OPTIONS) for layer in self._layers]
        self._install()

    def _install(self) -> None:
        for layer, forward in zip(self._layers, self._compiled, strict=True):
            layer.forward = forward

    @contextmanager
    def run_eagerly(self) -> Iterator[None]:
        """Let the layers compute as they did, for as long as the block lasts."""
        for layer in self._layers:
            del layer.forward  # which leaves that of its class
        try:
            yield
        finally:
            self._install()


@cache
def compiler_problem(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why torch cannot compile for `device`, and what to install; None = it can.

    It compiles a sum in `dtype`, as one graph: otherwise torch only warns where its compiler refuses bfloat16.
    """

    def double(numbers: Tensor) -> Tensor:
        return numbers + numbers

    try:
        torch.compile(double, fullgraph=True, **OPTIONS)(torch.ones(4, device=device, dtype=dtype))
        return None
    except Exception as error:  # of whatever kind a compiler fails with
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        needs = "a C++ compiler (g++) on the path" if device.type == "cpu" else "its device's compiler, e.g. triton"
        return f"torch cannot compile for {device.type}: {said}; install {needs}"
