"""The names that a base's tensors have in vLLM once its layers are wrapped for adapters that come by themselves.

    on the hub   model.layers.0.self_attn.q_proj.weight
    wrapped      model.layers.0.self_attn.q_proj.base_layer.weight     q, k and v are then packed by the model itself

vLLM 0.23, and so vllm-ascend 0.23, looks for the second; a newer one's wrapped layers take the first. The older way was
read in its source, and has not been run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

WRAPPED = ".base_layer."


def as_wrapped(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """`weights`, which have their names on the hub, by those that this model looks for."""
    inside = [name for name, _ in model.named_parameters() if WRAPPED in name and not _takes(model, name)]
    hidden = {unwrapped(name) for name in inside}
    packing: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    whole = {part: name for name, parts in packing.items() for part in parts}
    for name, tensor in weights:
        path, _, leaf = name.rpartition(".")
        *above, layer = path.split(".")
        sought = ".".join((*above, whole.get(layer, layer), leaf))
        yield (f"{path}{WRAPPED}{leaf}" if sought in hidden else name), tensor


def unwrapped(name: str) -> str:
    """A parameter's name as if nothing were wrapped."""
    return name.replace(WRAPPED, ".")


def _takes(model: nn.Module, name: str) -> bool:
    """Whether the layer around a wrapped one takes its weights by their names on the hub."""
    wrapper: Any = model.get_submodule(name.partition(WRAPPED)[0])
    return callable(getattr(type(wrapper), "load_weights", None))
