"""The export of a model that lies in pieces, one tensor after the other: no rank ever holds the whole.

pieces on every rank ──made whole──▶ first rank: as it is called and cut on the disk ──▶ its place in its file

What the files hold is known before any tensor is there, from a model of the same shapes on `meta`: transformers itself
says what it would write of that one. So the files are those of `save_pretrained`.
"""

from __future__ import annotations

import inspect
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from runner.model.alone import blanks, rebuilt
from runner.quiet import no_progress_bar
from runner.shards import whole
from runner.tensor_file import TYPES, Layout, arranged, create

LARGEST: int | str = inspect.signature(PreTrainedModel.save_pretrained).parameters["max_shard_size"].default
PATTERN = "model{suffix}.safetensors"  # as transformers calls them
LAYER = re.compile(r"(.*?\.\d+)\.")


def write(module: nn.Module, folder: Path | None, largest: int | str = LARGEST) -> None:
    """Write a transformers model as `save_pretrained` does, its tokenizer aside. Collective: one rank gives the folder,
    the others None.

    largest: bytes of a file. On the host of the rank that writes is one tensor at a time; a layer's, where one on the
    disk is made of several. What is raised there, of a full disk say, is raised when no rank waits for this one's
    pieces any more.
    """
    tensors = module.state_dict(keep_vars=True)
    tied: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        tied.setdefault(id(tensor), []).append(name)
    files: Files | None = None
    failed: Exception | None = None
    try:
        files = Files(module, tensors, folder, largest) if folder is not None else None
    except Exception as error:
        failed = error
    for names in tied.values():
        full = whole(tensors[names[0]])
        try:
            if files is not None and failed is None:
                files.take(names, full)
        except Exception as error:
            failed = error
        del full  # or it would be there while the next one is made
    if failed is not None:
        raise failed


class Written:
    """What is written of a model's tensors, which come in any order: as they are called and cut on the disk.

    model: the transformers model, of the same shapes on `meta`
    """

    def __init__(self, module: Any, tensors: Mapping[str, Tensor]) -> None:
        """module: a transformers model; tensors: of its shapes and types, tied ones as one, by all their names."""
        self.model = model = rebuilt(module, module, blanks(tensors))
        ignored = set(model._keys_to_ignore_on_save or ())
        state = {name: tensor for name, tensor in model.state_dict().items() if name not in ignored}
        state = remove_tied_weights_from_state_dict(state, model)
        self.planned: dict[str, Tensor] = revert_weight_conversion(model, dict(state))  # on `meta`
        self.groups = {name: group for group in groups(model, state, self.planned) for name in group}
        self._waiting: dict[str, Tensor] = {}

    def forget(self) -> None:
        """Begin anew, whatever was taken."""
        self._waiting.clear()

    def take(self, names: Sequence[str], tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """What is written of a tensor, which the model has under these names, now that it is there: nothing, where
        others are missing that it is written with."""
        for name in names:
            if (group := self.groups.get(name)) is None:
                continue  # tied to one that is written, or not written at all
            self._waiting[name] = tensor
            if all(other in self._waiting for other in group):
                found = {other: self._waiting.pop(other) for other in group}
                yield from revert_weight_conversion(self.model, found).items()


class Files:
    """A model's folder, with everything but the tensors' values; they come in any order."""

    def __init__(self, module: nn.Module, tensors: Mapping[str, Tensor], folder: Path, largest: int | str) -> None:
        """Write configs, headers and index. Raises OSError."""
        self._written = Written(module, tensors)
        model, planned = self._written.model, self._written.planned
        write_configs(model, folder)
        split = split_state_dict_into_shards_factory(
            planned,
            filename_pattern=PATTERN,
            max_shard_size=largest,
            get_storage_size=lambda tensor: tensor.untyped_storage().nbytes(),  # parts of one tensor stay together
            get_storage_id=lambda tensor: tensor.untyped_storage()._cdata,
        )
        self._layouts: dict[Path, Layout] = {}
        for file, names in split.filename_to_tensors.items():
            entries = {name: (TYPES[planned[name].dtype], tuple(planned[name].shape)) for name in names}
            self._layouts[folder / file] = arranged(entries, {"format": "pt"})
            create(folder / file, self._layouts[folder / file])
        if split.is_sharded:
            sizes = {"total_parameters": model.num_parameters(), **split.metadata}
            index = {"metadata": sizes, "weight_map": split.tensor_to_filename}
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(text, encoding="utf-8")
        self._places = {name: folder / file for name, file in split.tensor_to_filename.items()}

    def take(self, names: Sequence[str], tensor: Tensor) -> None:
        """Write a tensor, which the model has under these names, or keep it until those are there that it is written
        with. Raises OSError."""
        for written, values in self._written.take(names, tensor.cpu()):
            self._put(written, values)

    def _put(self, name: str, values: Tensor) -> None:
        path = self._places[name]
        layout = self._layouts[path]
        with path.open("r+b") as file:
            file.seek(len(layout.head) + layout.places[name][0])
            file.write(values.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def write_configs(model: Any, folder: Path) -> None:
    """Everything that `save_pretrained` writes of a transformers model but its weights, on any rank. Raises OSError."""
    with no_progress_bar():
        model.save_pretrained(folder, state_dict={})
        if not (folder / "config.json").exists():  # in a process group transformers writes on rank 0 alone
            model.config.save_pretrained(folder)
            if model.can_generate():
                model.generation_config.save_pretrained(folder)


def groups(model: Any, state: Mapping[str, Tensor], planned: Mapping[str, Tensor]) -> list[tuple[str, ...]]:
    """The smallest groups of tensors that are written without the others: each alone, those of a layer, or all.

    state: on `meta`; planned: what is written of it. transformers says what comes of tensors, not which it needs for
    that; tensors without the others that they need give other ones, or an error.
    """
    layers: defaultdict[str, list[str]] = defaultdict(list)
    for name in state:
        layers[found[1] if (found := LAYER.match(name)) else name].append(name)
    alone: list[tuple[str, ...]] = [(name,) for name in state]
    for tried in (alone, [tuple(names) for names in layers.values()]):
        parts = _converted(model, state, tried)
        made = {name: tensor for part in parts for name, tensor in part.items()}
        if sum(map(len, parts)) == len(made) and _sizes(made) == _sizes(planned):
            return tried
    return [tuple(state)]


def _converted(model: Any, state: Mapping[str, Tensor], tried: Sequence[tuple[str, ...]]) -> list[Mapping[str, Tensor]]:
    """What is written of each group by itself; nothing where one of them is not enough for a conversion."""
    try:
        return [revert_weight_conversion(model, {name: state[name] for name in group}) for group in tried]
    except Exception:  # of whatever kind each conversion raises that lacks a tensor
        return []


def _sizes(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
