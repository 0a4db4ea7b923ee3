"""Format of a checkpoint: sections of state as safetensors and JSON, and MANIFEST.json.

    {"policy": {"step": 3, "tensors": {...}}, "algorithm": {...}}
        │                        │
        ▼                        ▼
    state.json            policy.safetensors

The tensors of a section are one safetensors file, which all ranks with shards of them write together.

    first rank   ──▶ header (names, shapes, offsets), and space for the tensors
    every rank   ──▶ its shards at their positions

A shard is a range of rows, which is contiguous in the file, or of columns, which is contiguous in each row: the file
does not depend on the layout.

MANIFEST.json lists the files. It is written last, so an incomplete checkpoint has none.

    {"schema": 2, "step": 100, "written": "...Z", "metrics": {...},
     "files": {"policy.safetensors": {"bytes": ..., "xxh128": ...}, ...}, "digest": sha256 of all the above}

`xxh128` (XXH3-128) is computed while the file is written; nothing is read back. If several ranks wrote a file, it is
the digest of the header, and `parts` has one of each rank's shards. Schema 1 has `sha256` of each file.

`schema` and `digest` keep their meaning in every later schema, so that a newer manifest does not look damaged.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from runner.core import fsync_io
from runner.core.errors import CheckpointError, RunnerError, TrainingDiverged
from runner.core.safetensors_layout import RESERVED, SIZES, TYPES, FileLayout, compute_layout
from runner.core.untrusted_text import parse_json
from runner.distributed.dtensor_utils import local_tensor
from runner.interfaces import State

SCHEMA = 2
MANIFEST_FILE = "MANIFEST.json"
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class DamagedCheckpoint(CheckpointError):
    """A checkpoint's files have changed; the message names the file and the reason."""


@dataclass(frozen=True, slots=True)
class FilePart:
    """Digest of a file's header and the shards that one rank wrote: name → position, e.g. 0:16,0:8."""

    xxh128: str
    shards: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size in bytes and digest of a file; if several ranks wrote it, digests of its header and `parts`."""

    bytes: int
    xxh128: str = ""
    sha256: str = ""  # of schema 1
    parts: Sequence[FilePart] = ()


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checkpoint's contents; `written` is UTC in ISO 8601, for people only."""

    step: int
    written: str
    metrics: Mapping[str, float]
    files: Mapping[str, FileRecord]
    schema: int = SCHEMA


_BODY: TypeAdapter[Manifest] = TypeAdapter(Manifest)


def build_manifest(
    step: int,
    metrics: Mapping[str, float],
    values: bytes,
    layouts: Mapping[str, FileLayout],
    written: Sequence[Mapping[str, FilePart]],
) -> Manifest:
    """The manifest of state.json and the sections' files. written: by each rank, by section."""
    files = {VALUES: FileRecord(len(values), xxhash.xxh3_128_hexdigest(values))}
    for name, layout in layouts.items():
        parts = [one[name] for one in written if name in one and one[name].shards]
        digest = parts.pop().xxh128 if len(parts) == 1 else xxhash.xxh3_128_hexdigest(layout.head)
        files[f"{name}{SUFFIX}"] = FileRecord(len(layout.head) + layout.num_bytes, digest, parts=parts)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Manifest(step, now, {k: float(v) for k, v in metrics.items()}, files)


def encode_manifest(manifest: Manifest) -> bytes:
    """The content of MANIFEST.json, with its digest."""
    body = asdict(manifest)
    # JSON has no NaN or infinity; they are stored as text.
    body["metrics"] = {k: v if abs(v) < float("inf") else str(v) for k, v in manifest.metrics.items()}
    body["files"] = {name: {k: v for k, v in record.items() if v} for name, record in body["files"].items()}
    return json.dumps(body | {"digest": _manifest_digest(body)}, indent=2, allow_nan=False).encode() + b"\n"


def read_manifest(folder: Path) -> Manifest:
    """The manifest in `folder`. Raises DamagedCheckpoint, or CheckpointError if a newer runner wrote it."""
    try:
        body = parse_json((folder / MANIFEST_FILE).read_bytes())
    except OSError as error:
        raise DamagedCheckpoint(f"{MANIFEST_FILE}: {fsync_io.error_reason(error)}") from error
    except ValueError as error:
        raise DamagedCheckpoint(f"{MANIFEST_FILE}: not JSON ({error})") from error
    if not isinstance(body, dict) or body.pop("digest", None) != _manifest_digest(body):
        raise DamagedCheckpoint(f"{MANIFEST_FILE}: does not match its own digest")
    return _decode_manifest(folder, body)


def _decode_manifest(folder: Path, body: dict[str, Any]) -> Manifest:
    schema = body.get("schema")
    if isinstance(schema, int) and schema > SCHEMA:
        raise CheckpointError(
            f"{folder} has checkpoint schema {schema}; this runner reads up to {SCHEMA}: install the newer version "
            "that wrote it"
        )
    try:
        manifest = _BODY.validate_python(body)
    except ValidationError as error:
        first = error.errors()[0]
        raise DamagedCheckpoint(f"{MANIFEST_FILE}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    if bad := [name for name in manifest.files if not PLAIN_NAME.fullmatch(name)]:
        raise DamagedCheckpoint(f"{MANIFEST_FILE}: {bad[0]!r} is not the name of a file in its folder")
    if bad := [name for name, record in manifest.files.items() if not (record.xxh128 or record.sha256)]:
        raise DamagedCheckpoint(f"{MANIFEST_FILE}: {bad[0]} has no digest")
    return manifest


def _manifest_digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


WRITE_BYTES = 1 << 20  # of one call: larger ones take up to four times the processor time (Linux 6.18, ext4)
ALIASES = "aliases"  # header entry: JSON object, name → the tensor it is tied to


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor in the file: its type, its shape, and the name of the tensor that it is tied to, if any."""

    kind: str
    shape: tuple[int, ...]
    tied: str | None = None


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """The shard of a tensor that one rank writes: values, on any device, and their position in `shape`."""

    values: Tensor
    where: tuple[slice, ...]
    shape: tuple[int, ...]

    def contiguous_runs(self) -> Iterator[tuple[int, int]]:
        """The contiguous runs of the values in the full tensor: index of the first number, and count."""
        where, shape = self.where, self.shape
        cut = [dim for dim, part in enumerate(where) if part != slice(0, shape[dim])]
        last = cut[-1] if cut else 0  # dimensions after this one are contiguous
        strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
        count = prod(part.stop - part.start for part in where[last:])
        for index in product(*(range(part.start, part.stop) for part in where[:last])):
            first = sum(at * stride for at, stride in zip(index, strides, strict=False))
            yield first + (where[last].start * strides[last] if where else 0), count


def tensor_entries(tensors: Mapping[str, Tensor]) -> dict[str, TensorEntry]:
    """The file's entries for these tensors, of which this rank may have shards."""
    tied = _tied_names(tensors)
    return {name: TensorEntry(TYPES[t.dtype], tuple(t.shape), tied.get(name)) for name, t in tensors.items()}


def file_layout(entries: Mapping[str, TensorEntry]) -> FileLayout:
    """The layout of these tensors' file, tied ones once, independent of their order."""
    own = {name: (entry.kind, entry.shape) for name, entry in entries.items() if entry.tied is None}
    aliases = {name: entries[name].tied for name in sorted(entries.keys() - own.keys())}
    return compute_layout(own, {ALIASES: json.dumps(aliases)})


def write_pieces(path: Path, layout: FileLayout, pieces: Mapping[str, TensorPiece]) -> FilePart:
    """Write this rank's shards into the file of `create_file`, and flush it. Raises OSError.

    The file is only written, never read: NFS would write back whole pages that it has read, and overwrite what another
    machine has written meanwhile.
    """
    digest, shards = xxhash.xxh3_128(layout.head), dict[str, str]()
    with os.fdopen(os.open(path, os.O_WRONLY), "wb") as file:
        for name in sorted(pieces, key=layout.byte_ranges.__getitem__):
            piece = pieces[name]
            held = piece.values.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            digest.update(held.data)
            shards[name] = ",".join(f"{part.start}:{part.stop}" for part in piece.where)
            size, start = piece.values.element_size(), len(layout.head) + layout.byte_ranges[name][0]
            for at, count in piece.contiguous_runs():
                file.seek(start + at * size)
                run, held = np.split(held, [count * size])
                for begin in range(0, len(run), WRITE_BYTES):
                    file.write(run[begin : begin + WRITE_BYTES].data)
        file.flush()
        os.fsync(file.fileno())
    return FilePart(digest.hexdigest(), shards)


def is_intact(path: Path, record: FileRecord) -> bool:
    """Whether a file of the right size has the contents that were written; reads it once. Raises OSError."""
    with path.open("rb") as file:
        if not record.parts:
            found = hashlib.file_digest(file, hashlib.sha256 if record.sha256 else xxhash.xxh3_128)
            return found.hexdigest() == (record.sha256 or record.xxh128)
        head = file.read(8)
        head += file.read(min(int.from_bytes(head, "little"), record.bytes))
        if xxhash.xxh3_128_hexdigest(head) != record.xxh128:
            return False
        digests, entries = [xxhash.xxh3_128(head) for _ in record.parts], json.loads(head[8:])
        whole = np.memmap(file, np.uint8, "r")[len(head) :]  # a tensor can be larger than the memory that is left
        del entries[RESERVED]
        for name, entry in sorted(entries.items(), key=lambda one: one[1]["data_offsets"]):
            begin, end = entry["data_offsets"]
            values = whole[begin:end].reshape(*entry["shape"], SIZES[entry["dtype"]])
            for digest, part in zip(digests, record.parts, strict=True):
                if (position := part.shards.get(name)) is not None:
                    where = (slice(*map(int, one.split(":"))) for one in position.split(",") if one)
                    shard = values[tuple(where)]
                    rows = max(1, WRITE_BYTES * len(shard) // max(1, shard.nbytes))
                    for first in range(0, len(shard), rows):
                        digest.update(np.ascontiguousarray(shard[first : first + rows]).data)
    return [digest.hexdigest() for digest in digests] == [part.xxh128 for part in record.parts]


def is_written_here(tensor: Tensor) -> bool:
    """Whether this rank writes its shard: only the first replica does, and empty shards are skipped."""
    if not isinstance(tensor, DTensor):
        return True
    placed = zip(tensor.placements, tensor.device_mesh.get_coordinate() or (), strict=True)
    copies = [at for placement, at in placed if placement.is_replicate()]
    return not any(copies) and local_tensor(tensor).numel() > 0


def _tied_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Tensors that share their memory with an earlier one → the earlier one's name."""
    tied: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor) or not tensor.numel():  # a rank may have no part of it
            continue
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if (first := seen.setdefault(key, name)) != name:
            tied[name] = first
    return tied


VALUES = "state.json"
SUFFIX = ".safetensors"


@dataclass(frozen=True, slots=True)
class SplitState:
    """The state of one rank: the plain values and the tensors of each section."""

    values: Mapping[str, Any]
    tensors: Mapping[str, Mapping[str, Tensor]]


def split_state(state: Mapping[str, State]) -> SplitState:
    """Check `state` and split it into values and tensors, without copies.

    Raises RunnerError for a value that JSON cannot store, or a tensor that safetensors cannot store.
    """
    values: dict[str, Any] = {}
    tensors: dict[str, Mapping[str, Tensor]] = {}
    for name, section in state.items():
        if not PLAIN_NAME.fullmatch(name):
            raise RunnerError(f"a state section is named {name!r}; the name must be a valid file name")
        values[name] = _to_json_value({k: v for k, v in section.items() if k != "tensors"}, name)
        if "tensors" in section:
            tensors[name] = section["tensors"]
            _check_tensors(name, section["tensors"])
    return SplitState(values, tensors)


def refuse_infinite(pieces: Mapping[str, Mapping[str, TensorPiece]]) -> None:
    """Raise TrainingDiverged if a number of any section is not finite."""
    for section, held in pieces.items():
        if infinite := [name for name, piece in held.items() if not _is_finite(piece.values)]:
            raise TrainingDiverged(
                f"{section}: the tensor {infinite[0]} has NaN or infinity; no checkpoint was written, earlier ones are "
                "unchanged: continue from them with a smaller optimizer.lr or optimizer.clip_norm"
            )


def read_state(folder: Path, files: Mapping[str, Any], *, mapped: bool = False) -> dict[str, State]:
    """The state in `folder`, tensors on the CPU. The files must be verified. Raises DamagedCheckpoint.

    mapped: tensors are memory-mapped and read on use; they are valid only as long as the files exist.
    """
    try:
        state: dict[str, State] = json.loads((folder / VALUES).read_bytes())
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(f"{VALUES}: {error}") from error
    for name in files:
        if name.endswith(SUFFIX):
            state.setdefault(name.removesuffix(SUFFIX), {})["tensors"] = _read_tensors(folder / name, mapped)
    return state


def _read_tensors(path: Path, mapped: bool) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            if not mapped:  # if the file changed later, mapped tensors would change or crash the process
                tensors = {name: tensor.clone() for name, tensor in tensors.items()}
            aliases = json.loads((file.metadata() or {}).get(ALIASES, "{}"))
    except (OSError, ValueError, SafetensorError) as error:
        raise DamagedCheckpoint(f"{path.name}: {error}") from error
    return tensors | {alias: tensors[source] for alias, source in aliases.items()}


def _check_tensors(section: str, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or name == RESERVED or tensor.dtype not in TYPES or tensor.is_meta:
            raise RunnerError(f"{section}: {name!r} ({type(tensor).__name__}) cannot be stored in safetensors")


def _is_finite(tensor: Tensor) -> bool:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    wide = tensor.float() if tensor.element_size() == 1 else tensor  # torch has no isfinite for every float8
    # the sum of finite numbers may overflow, but a sum with NaN or infinity is never finite, and it is 20 times as fast
    return bool(wide.sum().isfinite()) or bool(wide.isfinite().all())


def _to_json_value(value: Any, where: str) -> Any:
    """`value` for JSON; tuples become lists, everything else that JSON would change is an error."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, list | tuple):
        return [_to_json_value(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, Mapping) and all(isinstance(k, str) for k in value):
        return {k: _to_json_value(v, f"{where}.{k}") for k, v in value.items()}
    raise RunnerError(
        f"the state {where} = {value!r:.80} has no exact JSON form; "
        'use finite numbers, text, lists and dicts with text keys, and put tensors under "tensors"'
    )
