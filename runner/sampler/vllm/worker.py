"""What vLLM's workers get beside their own methods: taking weights, by reference or from files.

Imported in each worker's process before its model is built, and so where its weights are kept from being packed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.platforms import current_platform

from runner.core.errors import EnvironmentProblem
from runner.sampler.vllm.weight_layout import (
    disable_cpu_packing,
    has_experts,
    lora_wrapped_names,
    reload_all_weights,
    strip_lora_wrapper,
)

if current_platform.is_cpu():
    disable_cpu_packing()


class WeightLoader:
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
            raise EnvironmentProblem(f"sampler=vllm: {kind} of vLLM does not accept the weights: {error!r}") from error
        lacking = (
            sorted(_parameters(model) - set(map(strip_lora_wrapper, taken))) if whole and taken is not None else []
        )
        if lacking:
            text = f"{len(lacking)} parameters of vLLM's {kind} were not sent, such as {lacking[:3]}"
            raise EnvironmentProblem(f"sampler=vllm: {text}; type sampler=torch")


def _parameters(model: nn.Module) -> set[str]:
    """Their names, as if no layer were wrapped for adapters."""
    return {strip_lora_wrapper(name) for name, _ in model.named_parameters()}


def _read(files: Sequence[str], names: frozenset[str]) -> Iterator[tuple[str, Tensor]]:
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in sorted(names.intersection(file.keys())):
                yield name, file.get_tensor(name)
