"""A model's tensors as others load them, one after the other, whatever the layout they lie in here.

    pieces on every rank ──made whole──▶ adapter merged, layer by layer ──▶ as on the disk (`streamed`)

    all       everything, the adapter merged into its base        changed   of that, what training can change
    base      everything but the adapter, not merged              fixed     the rest of it
    adapter   the adapter alone, under PEFT's names

What is merged is merged by peft itself, in float32, and is what an export has in its files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from runner.model.alone import adapter_of, blanks, rebuilt
from runner.model.streamed import Written
from runner.shards import whole

Way = Literal["all", "changed", "fixed", "base", "adapter"]


@dataclass(frozen=True, slots=True)
class Part:
    """Tensors that are made whole together: one, by all the names it is tied under, or those of an adapted layer.

    sources: names in the module; names: in the transformers model without an adapter; layer: the adapted layer's path
    in the module, None = there is none; learns: whether training can change any of it
    """

    sources: tuple[str, ...]
    names: tuple[str, ...]
    layer: str | None
    learns: bool


class Published:
    """What of a module is published, and how; made once, as modules keep their structure. Tensors are read anew."""

    def __init__(self, module: nn.Module, inner: Any) -> None:
        """module: a transformers model, `inner`, or a peft model around it."""
        self._module, self._inner = module, inner
        self._merged = _parts(module, inner, merged=True)
        self._plain = _parts(module, inner, merged=False)
        tensors = module.state_dict(keep_vars=True)
        self.written = Written(inner, {name: tensors[source] for name, source in _originals(module, inner).items()})
        learning = [name for part in self._merged if part.learns for name in part.names]
        groups = self.written.groups
        self._changing = {name for one in learning if one in groups for name in groups[one]}
        self._skeleton: Any = None

    def num_bytes(self, way: Way) -> int:
        """Size of what `tensors` gives, in the base's own types."""
        if way == "adapter":
            found = list(adapter_of(self._module, blanks(self._module.state_dict(keep_vars=True))).values())
        else:
            names = [name for name in self.written.groups if self._has(way, name)]
            found = [self.written.model.get_parameter_or_buffer(name) for name in names]
        return sum(blank.numel() * blank.itemsize for blank in found)

    @torch.no_grad()
    def tensors(self, way: Way, *, keep: bool, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        """Name and tensor of what `way` says. Collective: all ranks drain it; those that `keep` nothing get nothing.

        dtype: of floating-point numbers; None = the base's own. A tensor may be the model's own memory.
        """
        found = self._adapter(keep) if way == "adapter" else self._of_parts(way, keep, dtype)
        for name, tensor in found:
            yield name, _cast(tensor, dtype)

    def _adapter(self, keep: bool) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in adapter_of(self._module, self._module.state_dict(keep_vars=True)).items():
            full = whole(tensor)
            if keep:
                yield name, full

    def _of_parts(self, way: Way, keep: bool, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        tensors = self._module.state_dict(keep_vars=True)
        self.written.forget()
        for part in self._plain if way == "base" else self._merged:
            if not self._wanted(part, way):
                continue
            full = {name: whole(tensors[name]) for name in part.sources[: 1 if part.layer is None else None]}
            if not keep:
                continue
            if part.layer is None:
                yield from self.written.take(part.names, next(iter(full.values())))
                continue
            for name, tensor in self._as_base(part.layer, full).items():
                blank = self.written.model.get_parameter_or_buffer(name)
                yield from self.written.take([name], _cast(tensor, dtype or blank.dtype))

    def _wanted(self, part: Part, way: Way) -> bool:
        return any(self._has(way, name) for name in part.names if name in self.written.groups)

    def _has(self, way: Way, name: str) -> bool:
        """Whether a tensor that is written belongs to `way`."""
        return way in ("all", "base") or (name in self._changing) is (way == "changed")

    def _as_base(self, path: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """An adapted layer's tensors by their names in the transformers model, with the adapter in them: float32."""
        if self._skeleton is None:
            state = self._module.state_dict(keep_vars=True)
            self._skeleton = rebuilt(self._module, self._inner, blanks(state))
        layer = self._skeleton.get_submodule(path)
        empty = layer.state_dict(keep_vars=True)
        own = {name.removeprefix(f"{path}."): _wide(tensor) for name, tensor in tensors.items()}
        layer.load_state_dict(own, assign=True)
        found = _merged(layer).state_dict()
        layer.load_state_dict(empty, assign=True)
        for part in layer.modules():
            if hasattr(part, "merged_adapters"):
                part.merged_adapters.clear()
        below = path.removeprefix(_prefix(self._module, self._inner))
        return {f"{below}.{name}": tensor for name, tensor in found.items()}


def _wide(tensor: Tensor) -> Tensor:
    """A copy, in float32 if it is of floating-point numbers: what is merged into it is small."""
    return tensor.to(torch.float32 if tensor.is_floating_point() else tensor.dtype, copy=True)


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


def _merged(layer: Any) -> Any:
    """A layer without its adapter, which is in it now: as peft's `merge_and_unload` does it."""
    if hasattr(layer, "unload_and_optionally_merge_module"):
        return layer.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
    if hasattr(layer, "modules_to_save"):
        return layer.modules_to_save[layer.active_adapter]
    layer.merge(safe_merge=False)
    return layer.get_base_layer()


def _parts(module: nn.Module, inner: Any, *, merged: bool) -> list[Part]:
    """A module's tensors in their order; those of an adapted layer together, if they are to be merged."""
    tensors, names = module.state_dict(keep_vars=True), _originals(module, inner)
    layers = _adapted(module) if merged else {}
    sources = {source: name for name, source in names.items()}
    known: dict[int, int] = {}
    found: list[Part] = []
    for path in layers:
        own = tuple(name for name in tensors if name.startswith(f"{path}."))
        there = tuple(sources[name] for name in own if name in sources)
        found.append(Part(own, there, path, any(tensors[name].requires_grad for name in own)))
    for source, name in sources.items():
        tensor = tensors[source]
        if any(source.startswith(f"{path}.") for path in layers):
            continue
        if (at := known.get(id(tensor))) is not None:
            found[at] = Part((*found[at].sources, source), (*found[at].names, name), None, found[at].learns)
            continue
        known[id(tensor)] = len(found)
        found.append(Part((source,), (name,), None, tensor.requires_grad))
    order = {name: at for at, name in enumerate(tensors)}
    return sorted(found, key=lambda part: order[part.sources[0]])


def _originals(module: nn.Module, inner: Any) -> dict[str, str]:
    """Each tensor's name in the transformers model without an adapter → that in the module as it is."""
    prefix, layers = _prefix(module, inner), _adapted(module)
    tensors = module.state_dict(keep_vars=True)
    found: dict[str, str] = {}
    for source in tensors:
        if not any(source.startswith(f"{path}.") for path in layers):
            found[source.removeprefix(prefix)] = source
    for path, layer in layers.items():
        held = {id(tensor): name for name, tensor in tensors.items() if name.startswith(f"{path}.")}
        base = layer.original_module if hasattr(layer, "modules_to_save") else layer.get_base_layer()
        for name, tensor in base.state_dict(keep_vars=True).items():
            found[f"{path.removeprefix(prefix)}.{name}"] = held[id(tensor)]
    return found


def _adapted(module: nn.Module) -> dict[str, Any]:
    """The layers that an adapter changes, by their paths in the module; none of them holds another."""
    if not hasattr(module, "get_base_model"):
        return {}
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper

    found: dict[str, Any] = {}
    for path, part in module.named_modules():
        if isinstance(part, BaseTunerLayer | ModulesToSaveWrapper) and not _below(path, found):
            found[path] = part
    return found


def _below(path: str, others: Sequence[str] | Mapping[str, Any]) -> bool:
    return any(path.startswith(f"{other}.") for other in others)


def _prefix(module: nn.Module, inner: Any) -> str:
    """What the names in a module begin with of a transformers model in it."""
    path = next(path for path, part in module.named_modules() if part is inner)
    return f"{path}." if path else ""
