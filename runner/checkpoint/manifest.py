"""MANIFEST.json: the files of a checkpoint. It is written last, so that an unfinished one has none.

    {"schema": 1, "step": 100, "written": "...Z", "metrics": {...},
     "files": {"policy.safetensors": {"bytes": ..., "sha256": ...}, ...}, "digest": sha256 of all the above}

`schema` and `digest` keep their meaning in every later schema: a newer manifest can be told from a damaged one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from runner.core import fsync_io
from runner.core.bounded_text import parse_json
from runner.core.errors import CheckpointError

SCHEMA = 1
FILE = "MANIFEST.json"
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class DamagedCheckpoint(CheckpointError):
    """A checkpoint is not what was written; the message names the file and the reason."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size in bytes and hex SHA-256 of one file."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checkpoint's contents; `written` is UTC in ISO 8601, for people only."""

    step: int
    written: str
    metrics: Mapping[str, float]
    files: Mapping[str, FileRecord]
    schema: int = SCHEMA

    @property
    def total_bytes(self) -> int:
        """Size of all its files."""
        return sum(f.bytes for f in self.files.values())


_BODY: TypeAdapter[Manifest] = TypeAdapter(Manifest)


def build_manifest(folder: Path, step: int, metrics: Mapping[str, float]) -> Manifest:
    """The manifest of the files that lie in `folder` now."""
    files = {p.name: FileRecord(p.stat().st_size, fsync_io.sha256(p)) for p in sorted(folder.iterdir())}
    written = datetime.now(UTC).isoformat(timespec="seconds")
    return Manifest(step, written, {k: float(v) for k, v in metrics.items()}, files)


def encode(manifest: Manifest) -> bytes:
    """The manifest's file, with its own digest."""
    body = asdict(manifest)
    # JSON has no NaN or infinity; as text they come back exactly.
    body["metrics"] = {k: v if abs(v) < float("inf") else str(v) for k, v in manifest.metrics.items()}
    return json.dumps(body | {"digest": _digest(body)}, indent=2, allow_nan=False).encode() + b"\n"


def read(folder: Path) -> Manifest:
    """The manifest in `folder`. Raises Damaged, or CheckpointError when a newer runner wrote it."""
    try:
        body = parse_json((folder / FILE).read_bytes())
    except OSError as error:
        raise DamagedCheckpoint(f"{FILE}: {fsync_io.error_reason(error)}") from error
    except ValueError as error:
        raise DamagedCheckpoint(f"{FILE}: not JSON ({error})") from error
    if not isinstance(body, dict) or body.pop("digest", None) != _digest(body):
        raise DamagedCheckpoint(f"{FILE}: does not match its own digest")
    return _decode(folder, body)


def _decode(folder: Path, body: dict[str, Any]) -> Manifest:
    schema = body.get("schema")
    if isinstance(schema, int) and schema > SCHEMA:
        raise CheckpointError(
            f"{folder} has checkpoint schema {schema}; this runner reads up to {SCHEMA}: "
            f"install the newer version that wrote it, one that knows schema {schema}"
        )
    try:
        manifest = _BODY.validate_python(body)
    except ValidationError as error:
        first = error.errors()[0]
        raise DamagedCheckpoint(f"{FILE}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    if bad := [name for name in manifest.files if not PLAIN_NAME.fullmatch(name)]:
        raise DamagedCheckpoint(f"{FILE}: {bad[0]!r} is not the name of a file beside it")
    return manifest


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
