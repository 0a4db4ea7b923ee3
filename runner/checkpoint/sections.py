"""Sections of state, split into tensors (safetensors) and plain values (JSON), and put together again.

{"policy": {"step": 3, "tensors": {...}}, "algorithm": {...}}
    │                        │
    ▼                        ▼
state.json            policy.safetensors
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from runner.checkpoint.manifest import PLAIN_NAME, Damaged
from runner.errors import RunnerError, TrainingDiverged
from runner.protocols import State

VALUES = "state.json"
SUFFIX = ".safetensors"
ALIASES = "aliases"  # header entry: JSON object, name → the tensor it is tied to
RESERVED = "__metadata__"  # safetensors' own key


@dataclass(frozen=True, slots=True)
class Contents:
    """What a checkpoint holds: the text of state.json, and the tensors of each section that has any."""

    values: bytes
    tensors: Mapping[str, Mapping[str, Tensor]]

    @property
    def num_bytes(self) -> int:
        """Size on disk, but for the headers; tied tensors count once."""
        own = (t for tensors in self.tensors.values() for t in _untied(tensors)[0].values())
        return len(self.values) + sum(t.numel() * t.element_size() for t in own)


def split(state: Mapping[str, State]) -> Contents:
    """Check `state` and take it apart; nothing is copied yet.

    Raises TrainingDiverged when a tensor is not finite, RunnerError when a value has no JSON form.
    """
    values: dict[str, Any] = {}
    tensors: dict[str, Mapping[str, Tensor]] = {}
    for name, section in state.items():
        if not PLAIN_NAME.fullmatch(name):
            raise RunnerError(f"a section of state is called {name!r}; it must be usable as a file's name")
        values[name] = _plain({k: v for k, v in section.items() if k != "tensors"}, name)
        if "tensors" in section:
            tensors[name] = section["tensors"]
            _check_tensors(name, section["tensors"])
    return Contents(json.dumps(values, indent=1, allow_nan=False).encode() + b"\n", tensors)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a section's tensors; tied ones once. Raises SafetensorError or OSError."""
    own, aliases = _untied(tensors)
    storages: set[int] = set()
    ready = {}
    for name, tensor in own.items():
        value = tensor.detach().cpu().contiguous()
        # Views that overlap without being equal are stored apart: safetensors refuses shared memory.
        shared = value.numel() > 0 and value.untyped_storage().data_ptr() in storages
        ready[name] = value.clone() if shared else value
        storages.add(value.untyped_storage().data_ptr())
    save_file(ready, path, metadata={ALIASES: json.dumps(aliases)})


def read(folder: Path, files: Mapping[str, Any]) -> dict[str, State]:
    """The state in `folder`, tensors on the CPU. The files must have been verified. Raises Damaged."""
    try:
        state: dict[str, State] = json.loads((folder / VALUES).read_bytes())
    except (OSError, ValueError) as error:
        raise Damaged(f"{VALUES}: {error}") from error
    for name in files:
        if name.endswith(SUFFIX):
            state.setdefault(name.removesuffix(SUFFIX), {})["tensors"] = _read_tensors(folder / name)
    return state


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            # Copies: a mapped file that is deleted or replaced later would change, or kill, who uses its tensors.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - not a mapping
            aliases = json.loads((file.metadata() or {}).get(ALIASES, "{}"))
    except (OSError, ValueError, SafetensorError) as error:
        raise Damaged(f"{path.name}: {error}") from error
    return tensors | {alias: tensors[source] for alias, source in aliases.items()}


def _untied(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors without those that are the very same memory as an earlier one, and which is whose alias."""
    own: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in tensors.items():
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and key in seen:
            aliases[name] = seen[key]
        else:
            own[name] = tensor
            seen[key] = name
    return own, aliases


def _check_tensors(section: str, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or name == RESERVED or tensor.dtype == torch.complex128:
            raise RunnerError(f"{section}: {name!r} ({type(tensor).__name__}) cannot be stored in safetensors")
        if not _is_finite(tensor):
            raise TrainingDiverged(
                f"{section}: the tensor {name} has NaN or infinity; no checkpoint was written with it, the ones before "
                "are untouched: go on from them with a smaller optimizer.lr or optimizer.clip_norm"
            )


def _is_finite(tensor: Tensor) -> bool:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    wide = tensor.float() if tensor.element_size() == 1 else tensor  # torch has no isfinite for every float8
    return bool(wide.isfinite().all())


def _plain(value: Any, where: str) -> Any:
    """`value` as JSON keeps it; tuples become lists, everything else that would change is refused."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, list | tuple):
        return [_plain(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, Mapping) and all(isinstance(k, str) for k in value):
        return {k: _plain(v, f"{where}.{k}") for k, v in value.items()}
    raise RunnerError(
        f"the state {where} = {value!r:.80} has no exact JSON form; "
        'use finite numbers, text, lists and dicts with text keys, and put tensors under "tensors"'
    )
