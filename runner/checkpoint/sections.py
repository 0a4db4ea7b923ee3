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

from safetensors import SafetensorError, safe_open
from torch import Tensor

from runner.checkpoint.manifest import PLAIN_NAME, Damaged
from runner.checkpoint.tensors import ALIASES, Piece
from runner.errors import RunnerError, TrainingDiverged
from runner.protocols import State
from runner.tensor_file import RESERVED, TYPES

VALUES = "state.json"
SUFFIX = ".safetensors"


@dataclass(frozen=True, slots=True)
class Contents:
    """What one rank has of the state: the plain values of each section, and the tensors of those that have any."""

    values: Mapping[str, Any]
    tensors: Mapping[str, Mapping[str, Tensor]]


def split(state: Mapping[str, State]) -> Contents:
    """Check `state` and take it apart; nothing is copied, and no tensor is read. Raises RunnerError when a value has no
    JSON form, or a tensor none in safetensors."""
    values: dict[str, Any] = {}
    tensors: dict[str, Mapping[str, Tensor]] = {}
    for name, section in state.items():
        if not PLAIN_NAME.fullmatch(name):
            raise RunnerError(f"a section of state is called {name!r}; it must be usable as a file's name")
        values[name] = _plain({k: v for k, v in section.items() if k != "tensors"}, name)
        if "tensors" in section:
            tensors[name] = section["tensors"]
            _check_tensors(name, section["tensors"])
    return Contents(values, tensors)


def encode(values: Mapping[str, Any]) -> bytes:
    """The text of state.json."""
    return json.dumps(values, indent=1, allow_nan=False).encode() + b"\n"


def refuse_infinite(section: str, pieces: Mapping[str, Piece]) -> None:
    """Raise TrainingDiverged when a number is not finite."""
    for name, piece in pieces.items():
        if not _is_finite(piece.values):
            raise TrainingDiverged(
                f"{section}: the tensor {name} has NaN or infinity; no checkpoint was written with it, the ones before "
                "are untouched: go on from them with a smaller optimizer.lr or optimizer.clip_norm"
            )


def read(folder: Path, files: Mapping[str, Any], *, mapped: bool = False) -> dict[str, State]:
    """The state in `folder`, tensors on the CPU. The files must have been verified. Raises Damaged.

    mapped: tensors are read when and as far as they are used; they live as the files do, so copy what has to stay.
    """
    try:
        state: dict[str, State] = json.loads((folder / VALUES).read_bytes())
    except (OSError, ValueError) as error:
        raise Damaged(f"{VALUES}: {error}") from error
    for name in files:
        if name.endswith(SUFFIX):
            state.setdefault(name.removesuffix(SUFFIX), {})["tensors"] = _read_tensors(folder / name, mapped)
    return state


def _read_tensors(path: Path, mapped: bool) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            if not mapped:  # a file that is replaced later would change, or kill, who uses its tensors
                tensors = {name: tensor.clone() for name, tensor in tensors.items()}
            aliases = json.loads((file.metadata() or {}).get(ALIASES, "{}"))
    except (OSError, ValueError, SafetensorError) as error:
        raise Damaged(f"{path.name}: {error}") from error
    return tensors | {alias: tensors[source] for alias, source in aliases.items()}


def _check_tensors(section: str, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or name == RESERVED or tensor.dtype not in TYPES or tensor.is_meta:
            raise RunnerError(f"{section}: {name!r} ({type(tensor).__name__}) cannot be stored in safetensors")


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
