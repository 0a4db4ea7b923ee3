"""New weights for a model with experts: vLLM lays these out anew for its kernels, layer by layer, whole layers at once.

Its model runner has a way of its own for it; never run here, as on the CPU the kernel keeps its first copy.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from runner.core.errors import EnvironmentProblem

LAYERS = frozenset({"FusedMoE", "SharedFusedMoE", "RoutedExperts", "AscendFusedMoE"})  # as versions have called them


def has_experts(model: nn.Module) -> bool:
    """Whether some layer of vLLM's model is one of experts."""
    return any(kind.__name__ in LAYERS for module in model.modules() for kind in type(module).__mro__)


def reload(runner: Any, weights: Iterable[tuple[str, Tensor]], device: str) -> None:
    """All of the model's weights, anew. Raises EnvironmentProblem where this vLLM cannot."""
    if device == "cpu":
        text = "vLLM on the CPU packs experts once, and keeps them whatever is loaded later"
        raise EnvironmentProblem(f"sampler=vllm: {text}; use sampler=torch here")
    known = getattr(runner, "reload_weights", None)
    if known is None or "weights_iterator" not in inspect.signature(known).parameters:
        text = f"{type(runner).__name__} of this vLLM takes no new experts (reload_weights with weights_iterator)"
        raise EnvironmentProblem(f"sampler=vllm: {text}; install a newer vLLM, or use sampler=torch")
    known(weights_iterator=weights)
