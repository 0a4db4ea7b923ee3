"""The tensors of a model under the names of a Hugging Face folder or PEFT adapter, under any layout.

    shards on every rank ──gathered──▶ adapter merged, layer by layer ──▶ names and splits of the file ──▶ its place

    all       everything, the adapter merged into its base        changed   of that, what training can change
    base      everything but the adapter, not merged              fixed     the rest of it
    adapter   the adapter alone, under PEFT's names

No rank ever holds the whole model. What an export's files will hold is known before any tensor is there, from a model
of the same shapes on `meta`: transformers says what it would write of it, so that the files are those of
`save_pretrained`. peft itself merges adapters, in float32.
"""

from __future__ import annotations

import inspect
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from runner.core.progress_bars import no_progress_bar
from runner.core.safetensors_layout import TYPES, FileLayout, compute_layout, create_file
from runner.distributed.dtensor_utils import full_tensor
from runner.interfaces import WeightSubset
from runner.model.export import adapter_state_dict, meta_tensors, rebuild_module

MAX_SHARD_SIZE: int | str = inspect.signature(PreTrainedModel.save_pretrained).parameters["max_shard_size"].default
SHARD_FILE_PATTERN = "model{suffix}.safetensors"  # as transformers calls them
LAYER_PATTERN = re.compile(r"(.*?\.\d+)\.")


def write_hf_folder(
    state: HfStateDict, folder: Path | None, dtype: torch.dtype | None, max_shard_size: int | str = MAX_SHARD_SIZE
) -> None:
    """Write a model as `save_pretrained` does, an adapter merged, without tokenizer. Collective.

    One rank gives the folder, the others None. dtype: of floating-point numbers, None = the base's own; max_shard_size:
    bytes of a file. On the host of the writing rank is one tensor at a time; a layer's, where one on the disk is made
    of several. Errors of writing, e.g. a full disk, are raised when no other rank waits any more.
    """
    files: HfFolderWriter | None = None
    failed: Exception | None = None
    try:
        files = HfFolderWriter(state.converter, folder, dtype, max_shard_size) if folder is not None else None
    except Exception as error:
        failed = error
    for name, tensor in state.tensors("all", keep=folder is not None, dtype=dtype):
        try:
            if files is not None and failed is None:
                files.write_tensor(name, tensor)
        except Exception as error:
            failed = error
        del tensor
    if failed is not None:
        raise failed


class HfTensorConverter:
    """Converts a model's tensors, which come in any order, into the names and splits of the files.

    model: the transformers model, of the same shapes on `meta`
    """

    def __init__(self, module: Any, tensors: Mapping[str, Tensor]) -> None:
        """module: a transformers model; tensors: its shapes and types by name, tied ones as one object."""
        self.model = model = rebuild_module(module, module, meta_tensors(tensors))
        ignored = set(model._keys_to_ignore_on_save or ())
        state = {name: tensor for name, tensor in model.state_dict().items() if name not in ignored}
        state = remove_tied_weights_from_state_dict(state, model)
        self.target_tensors: dict[str, Tensor] = revert_weight_conversion(model, dict(state))  # on `meta`
        self.groups = {name: group for group in conversion_groups(model, state, self.target_tensors) for name in group}
        self._waiting: dict[str, Tensor] = {}

    def reset(self) -> None:
        """Begin again, whatever was taken."""
        self._waiting.clear()

    def convert(self, names: Sequence[str], tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """What is written of a tensor that the model has under these names.

        Nothing, while tensors are missing that it is converted with.
        """
        for name in names:
            if (group := self.groups.get(name)) is None:
                continue  # tied to one that is written, or not written at all
            self._waiting[name] = tensor
            if all(other in self._waiting for other in group):
                found = {other: self._waiting.pop(other) for other in group}
                yield from revert_weight_conversion(self.model, found).items()


class HfFolderWriter:
    """A model's folder, with everything but the tensors' values; they come in any order."""

    def __init__(
        self, converter: HfTensorConverter, folder: Path, dtype: torch.dtype | None, max_shard_size: int | str
    ) -> None:
        """Write configs, headers and index. Raises OSError."""
        model = converter.model
        planned = {name: _cast(tensor, dtype) for name, tensor in converter.target_tensors.items()}
        write_configs(model, folder, dtype)
        split = split_state_dict_into_shards_factory(
            planned,
            filename_pattern=SHARD_FILE_PATTERN,
            max_shard_size=max_shard_size,
            get_storage_size=lambda tensor: tensor.untyped_storage().nbytes(),  # parts of one tensor stay together
            get_storage_id=lambda tensor: tensor.untyped_storage()._cdata,
        )
        self._layouts: dict[Path, FileLayout] = {}
        for file, names in split.filename_to_tensors.items():
            entries = {name: (TYPES[planned[name].dtype], tuple(planned[name].shape)) for name in names}
            self._layouts[folder / file] = compute_layout(entries, {"format": "pt"})
            create_file(folder / file, self._layouts[folder / file])
        if split.is_sharded:
            sizes = {"total_parameters": model.num_parameters(), **split.metadata}
            index = {"metadata": sizes, "weight_map": split.tensor_to_filename}
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(text, encoding="utf-8")
        self._places = {name: folder / file for name, file in split.tensor_to_filename.items()}

    def write_tensor(self, name: str, tensor: Tensor) -> None:
        """Write a tensor, by its name in the files. Raises OSError."""
        values = tensor.cpu()
        path = self._places[name]
        layout = self._layouts[path]
        with path.open("r+b") as file:
            file.seek(len(layout.head) + layout.byte_ranges[name][0])
            file.write(values.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def write_configs(model: Any, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Write everything of `save_pretrained` except the weights, on any rank. Raises OSError.

    model: its type is not changed; dtype: of the weights, None = the model's
    """
    model = model if dtype is None else deepcopy(model).to(dtype)
    with no_progress_bar():
        model.save_pretrained(folder, state_dict={})
        if not (folder / "config.json").exists():  # in a process group transformers writes on rank 0 alone
            model.config.save_pretrained(folder)
            if model.can_generate():
                model.generation_config.save_pretrained(folder)


def write_adapter_config(module: Any, folder: Path) -> None:
    """Write the config of a peft model's adapter, to be loaded for inference. Raises OSError."""
    config = copy(module.peft_config[module.active_adapter])
    config.inference_mode = True
    config.save_pretrained(str(folder))


def conversion_groups(model: Any, state: Mapping[str, Tensor], planned: Mapping[str, Tensor]) -> list[tuple[str, ...]]:
    """The smallest groups of tensors that are written together: each alone, those of a layer, or all.

    state: on `meta`; planned: what is written of it. transformers says what comes of tensors, not which it needs for
    that; tensors without the others that they need give other ones, or an error.
    """
    layers: defaultdict[str, list[str]] = defaultdict(list)
    for name in state:
        layers[found[1] if (found := LAYER_PATTERN.match(name)) else name].append(name)
    alone: list[tuple[str, ...]] = [(name,) for name in state]
    for tried in (alone, [tuple(names) for names in layers.values()]):
        parts = _convert_groups(model, state, tried)
        made = {name: tensor for part in parts for name, tensor in part.items()}
        if sum(map(len, parts)) == len(made) and _types_and_shapes(made) == _types_and_shapes(planned):
            return tried
    return [tuple(state)]


def _convert_groups(
    model: Any, state: Mapping[str, Tensor], tried: Sequence[tuple[str, ...]]
) -> list[Mapping[str, Tensor]]:
    """What is written of each group by itself; nothing where one of them is not enough for a conversion."""
    try:
        return [revert_weight_conversion(model, {name: state[name] for name in group}) for group in tried]
    except Exception:  # of whatever kind each conversion raises that lacks a tensor
        return []


def _types_and_shapes(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors that are gathered together: one, with all its tied names, or those of an adapted layer.

    sources: names in the module; names: in the transformers model without an adapter; layer: the adapted layer's path
    in the module, None = there is none; is_trained: whether training can change any of it
    """

    sources: tuple[str, ...]
    names: tuple[str, ...]
    layer: str | None
    is_trained: bool


class HfStateDict:
    """Names and merge rules of a module's tensors; computed once, while tensors are read each time."""

    def __init__(self, module: nn.Module, inner: Any) -> None:
        """module: a transformers model, `inner`, or a peft model around it."""
        self._module, self._inner = module, inner
        self._merged = _tensor_groups(module, inner, merged=True)
        self._plain = _tensor_groups(module, inner, merged=False)
        tensors = module.state_dict(keep_vars=True)
        self.converter = HfTensorConverter(
            inner, {name: tensors[source] for name, source in _base_names(module, inner).items()}
        )
        learning = [name for part in self._merged if part.is_trained for name in part.names]
        groups = self.converter.groups
        self._changing = {name for one in learning if one in groups for name in groups[one]}
        self._skeleton: Any = None

    def num_bytes(self, which: WeightSubset) -> int:
        """Size of what `tensors` gives, in the base's own types."""
        if which == "adapter":
            blanks = meta_tensors(self._module.state_dict(keep_vars=True))
            found = list(adapter_state_dict(self._module, blanks).values())
        else:
            names = [name for name in self.converter.groups if self._includes(which, name)]
            found = [self.converter.model.get_parameter_or_buffer(name) for name in names]
        return sum(blank.numel() * blank.itemsize for blank in found)

    def tensors(self, which: WeightSubset, *, keep: bool, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors of `which`. Collective: all ranks iterate; those without `keep` get nothing.

        dtype: of floating-point numbers; None = the base's own. A tensor may be the model's own memory.
        """
        found = self._adapter_tensors(keep) if which == "adapter" else self._merged_tensors(which, keep, dtype)
        for name, tensor in found:
            yield name, _cast(tensor, dtype)
            del tensor

    def _adapter_tensors(self, keep: bool) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in adapter_state_dict(self._module, self._module.state_dict(keep_vars=True)).items():
            full = full_tensor(tensor)
            if keep:
                yield name, full

    def _merged_tensors(
        self, which: WeightSubset, keep: bool, dtype: torch.dtype | None
    ) -> Iterator[tuple[str, Tensor]]:
        tensors = self._module.state_dict(keep_vars=True)
        self.converter.reset()
        for part in self._plain if which == "base" else self._merged:
            if not any(self._includes(which, name) for name in part.names if name in self.converter.groups):
                continue
            full: dict[str, Tensor] = {}  # or the one before would be there while the next one is gathered
            full = {name: full_tensor(tensors[name]) for name in part.sources[: 1 if part.layer is None else None]}
            if not keep:
                continue
            if part.layer is None:
                yield from self.converter.convert(part.names, next(iter(full.values())))
                continue
            for name, tensor in self._merge_layer(part.layer, full).items():
                blank = self.converter.model.get_parameter_or_buffer(name)
                yield from self.converter.convert([name], _cast(tensor, dtype or blank.dtype))

    def _includes(self, which: WeightSubset, name: str) -> bool:
        """Whether a tensor that is written belongs to `which`."""
        return which in ("all", "base") or (name in self._changing) is (which == "changed")

    @torch.no_grad()
    def _merge_layer(self, path: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """An adapted layer's tensors, adapter merged, by their names in the transformers model: float32."""
        if self._skeleton is None:
            state = self._module.state_dict(keep_vars=True)
            self._skeleton = rebuild_module(self._module, self._inner, meta_tensors(state))
        layer = self._skeleton.get_submodule(path)
        empty = layer.state_dict(keep_vars=True)
        own = {name.removeprefix(f"{path}."): _to_float32(tensor) for name, tensor in tensors.items()}
        layer.load_state_dict(own, assign=True)
        found = _unload_adapter(layer).state_dict()
        layer.load_state_dict(empty, assign=True)
        for part in layer.modules():
            if hasattr(part, "merged_adapters"):
                part.merged_adapters.clear()
        below = path.removeprefix(_base_prefix(self._module, self._inner))
        return {f"{below}.{name}": tensor for name, tensor in found.items()}


def _to_float32(tensor: Tensor) -> Tensor:
    """A copy, in float32 if it is of floating-point numbers: what is merged into it is small."""
    return tensor.to(torch.float32 if tensor.is_floating_point() else tensor.dtype, copy=True)


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


def _unload_adapter(layer: Any) -> Any:
    """A layer without its adapter, which is in it now: as peft's `merge_and_unload` does it."""
    if hasattr(layer, "unload_and_optionally_merge_module"):
        return layer.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
    if hasattr(layer, "modules_to_save"):
        return layer.modules_to_save[layer.active_adapter]
    layer.merge(safe_merge=False)
    return layer.get_base_layer()


def _tensor_groups(module: nn.Module, inner: Any, *, merged: bool) -> list[TensorGroup]:
    """A module's tensors in their order; those of an adapted layer together, if they are to be merged."""
    tensors, names = module.state_dict(keep_vars=True), _base_names(module, inner)
    layers = _adapted_layers(module) if merged else {}
    sources = {source: name for name, source in names.items()}
    known: dict[int, int] = {}
    found: list[TensorGroup] = []
    for path in layers:
        own = tuple(name for name in tensors if name.startswith(f"{path}."))
        there = tuple(sources[name] for name in own if name in sources)
        found.append(TensorGroup(own, there, path, any(tensors[name].requires_grad for name in own)))
    for source, name in sources.items():
        tensor = tensors[source]
        if any(source.startswith(f"{path}.") for path in layers):
            continue
        if (at := known.get(id(tensor))) is not None:
            found[at] = TensorGroup((*found[at].sources, source), (*found[at].names, name), None, found[at].is_trained)
            continue
        known[id(tensor)] = len(found)
        found.append(TensorGroup((source,), (name,), None, tensor.requires_grad))
    order = {name: at for at, name in enumerate(tensors)}
    return sorted(found, key=lambda part: order[part.sources[0]])


def _base_names(module: nn.Module, inner: Any) -> dict[str, str]:
    """Each tensor's name in the transformers model without an adapter → that in the module as it is."""
    prefix, layers = _base_prefix(module, inner), _adapted_layers(module)
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


def _adapted_layers(module: nn.Module) -> dict[str, Any]:
    """The layers that an adapter changes, by their paths in the module; none of them holds another."""
    if not hasattr(module, "get_base_model"):
        return {}
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper

    found: dict[str, Any] = {}
    for path, part in module.named_modules():
        is_adapted = isinstance(part, BaseTunerLayer | ModulesToSaveWrapper)
        if is_adapted and not any(path.startswith(f"{other}.") for other in found):
            found[path] = part
    return found


def _base_prefix(module: nn.Module, inner: Any) -> str:
    """What the names in a module begin with of a transformers model in it."""
    path = next(path for path, part in module.named_modules() if part is inner)
    return f"{path}." if path else ""
