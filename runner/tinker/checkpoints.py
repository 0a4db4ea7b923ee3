"""Checkpoints of training clients on the disk, below `clients/` of the run folder.

    clients/<session>-train-<n>/client.json                 who it is: base, LoRA, metadata, owner
                               /weights/<name>/             a PEFT adapter, and the optimizer's state
                               /sampler_weights/<name>/     a PEFT adapter
    tinker://<session>:train:<n>/weights/<name>             what clients call the second one

Each is written to a staging folder, flushed and renamed; checkpoint.json has the SHA-256 of every file. An adapter that
was never named (sampler weights without a name) is kept for a day.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from runner.core import fsync_io
from runner.core.errors import CheckpointError, DataError, StorageError
from runner.core.fsync_io import failpoint

SCHEME = "tinker://"
KINDS = {"weights": "training", "sampler_weights": "sampler"}
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
RECORD, ADAPTER, OPTIMIZER = "checkpoint.json", "adapter_model.safetensors", "optimizer.safetensors"
UNNAMED = "unnamed-"
UNNAMED_S = 24 * 3600
LONGEST_TTL_S = 10 * 366 * 24 * 3600


class NotFoundError(DataError):
    """There is nothing of this name, or it belongs to another key."""


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """LoRA of a training client, as it was requested; alpha is the server's."""

    rank: int
    seed: int
    alpha: float
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


@dataclass(frozen=True, slots=True)
class ClientRecord:
    """A training client: its model_id, the digest of the key that owns it, and what it trains."""

    model_id: str
    owner: str
    base_model: str
    lora: LoraSettings
    created: str
    user_metadata: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """What a checkpoint's folder says of itself. digest: of the adapter's tensors; files: name → SHA-256."""

    step: int
    digest: str
    created: str
    size_bytes: int = 0
    expires: str | None = None
    user_metadata: Mapping[str, str] | None = None
    optimizer: Sequence[Mapping[str, Any]] | None = None  # AdamW's parameter groups; None = no state was saved
    files: Mapping[str, str] | None = None

    @property
    def is_expired(self) -> bool:
        """Whether its TTL has passed."""
        return self.expires is not None and datetime.fromisoformat(self.expires) <= datetime.now(UTC)


def now_text(after_s: float = 0.0) -> str:
    """The time, ISO 8601, or that in some seconds."""
    return (datetime.now(UTC) + timedelta(seconds=after_s)).isoformat(timespec="milliseconds")


@dataclass(frozen=True, slots=True)
class CheckpointPath:
    """`tinker://model_id/kind/name`."""

    model_id: str
    kind: str
    name: str

    @classmethod
    def parse(cls, text: str) -> CheckpointPath:
        """Raises DataError for another form."""
        parts = text.removeprefix(SCHEME).split("/")
        if not text.startswith(SCHEME) or len(parts) != 3 or parts[1] not in KINDS or not NAME.fullmatch(parts[2]):
            raise DataError(f"'{text}' is no path of a checkpoint; expected {SCHEME}RUN/weights/NAME")
        return cls(*parts)

    def __str__(self) -> str:
        return f"{SCHEME}{self.model_id}/{self.kind}/{self.name}"


class ClientStore:
    """The folder `clients/`. Only rank 0 writes, and reads for the others."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def folder(self, model_id: str) -> Path:
        """That of a training client. Raises NotFoundError for an id that no server gives."""
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}:train:\d{1,9}", model_id):
            raise NotFoundError(f"no training client '{model_id}'")
        return self._root / model_id.replace(":", "-")

    def path(self, checkpoint: CheckpointPath) -> Path:
        """The folder of a checkpoint, which need not exist."""
        return self.folder(checkpoint.model_id) / checkpoint.kind / checkpoint.name

    def add_client(self, record: ClientRecord) -> None:
        """Write client.json. Raises StorageError."""
        folder = self.folder(record.model_id)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            fsync_io.atomic_write(folder / "client.json", _json(asdict(record)))
        except OSError as error:
            raise StorageError(f"cannot write {folder}: {fsync_io.error_reason(error)}") from error

    def find_client(self, model_id: str, owner: str) -> ClientRecord:
        """Raises NotFoundError, also where another key owns it."""
        try:
            found = json.loads((self.folder(model_id) / "client.json").read_bytes())
        except (OSError, ValueError) as error:
            raise NotFoundError(f"no training client '{model_id}'") from error
        if found["owner"] != owner:
            raise NotFoundError(f"no training client '{model_id}'")
        return ClientRecord(**{**found, "lora": LoraSettings(**found["lora"])})

    def clients(self, owner: str) -> list[ClientRecord]:
        """Those of a key, the newest first."""
        ids = (re.sub(r"-train-(\d+)$", r":train:\1", path.parent.name) for path in self._root.glob("*/client.json"))
        found = []
        for model_id in ids:
            try:
                found.append(self.find_client(model_id, owner))
            except NotFoundError:  # of another key
                continue
        return sorted(found, key=lambda one: (one.created, one.model_id), reverse=True)

    def checkpoints(self, model_id: str) -> Iterator[tuple[CheckpointPath, CheckpointRecord]]:
        """Those of a client that have a name and are not expired, the newest first."""
        found = []
        for kind in KINDS:
            for path in (self.folder(model_id) / kind).glob(f"*/{RECORD}"):
                checkpoint = CheckpointPath(model_id, kind, path.parent.name)
                record = self.record(checkpoint)
                if not checkpoint.name.startswith(UNNAMED) and not record.is_expired:
                    found.append((checkpoint, record))
        yield from sorted(found, key=lambda one: one[1].created, reverse=True)

    def record(self, checkpoint: CheckpointPath) -> CheckpointRecord:
        """Raises NotFoundError."""
        try:
            return CheckpointRecord(**json.loads((self.path(checkpoint) / RECORD).read_bytes()))
        except (OSError, ValueError) as error:
            raise NotFoundError(f"there is no checkpoint {checkpoint}") from error

    def set_expiry(self, checkpoint: CheckpointPath, ttl_s: int | None) -> None:
        """Let it expire in `ttl_s` seconds from now; None = never. Raises NotFoundError."""
        record = replace(self.record(checkpoint), expires=None if ttl_s is None else now_text(ttl_s))
        fsync_io.atomic_write(self.path(checkpoint) / RECORD, _json(asdict(record)))

    def delete(self, checkpoint: CheckpointPath) -> None:
        """Raises NotFoundError."""
        self.record(checkpoint)
        folder = self.path(checkpoint)
        gone = folder.with_name(f"{fsync_io.STAGED}{folder.name}.{secrets.token_hex(4)}")
        os.replace(folder, gone)
        shutil.rmtree(gone)

    def delete_expired(self) -> list[str]:
        """Delete all whose TTL has passed, and what a killed process has left; returns their paths."""
        found = []
        for record in self._root.glob(f"*/*/*/{RECORD}"):
            if record.parent.name.startswith(fsync_io.STAGED):
                shutil.rmtree(record.parent, ignore_errors=True)
            elif CheckpointRecord(**json.loads(record.read_bytes())).is_expired:
                shutil.rmtree(record.parent)
                found.append(str(record.parent))
        return found

    def write(
        self,
        checkpoint: CheckpointPath,
        record: CheckpointRecord,
        adapter: Mapping[str, Tensor],
        config: Any,
        optimizer: Mapping[str, Tensor] | None,
        *,
        overwrite: bool = False,
    ) -> None:
        """Write a checkpoint atomically. config: the adapter's, of peft.

        Raises DataError if it exists already, StorageError if it cannot be written.
        """
        folder = self.path(checkpoint)
        if folder.exists() and not overwrite:
            raise DataError(f"{checkpoint} exists; choose another name, or pass overwrite=True")
        staged = folder.with_name(f"{fsync_io.STAGED}{folder.name}.{secrets.token_hex(4)}")
        try:
            staged.mkdir(parents=True)
            config.save_pretrained(str(staged))
            save_file(
                {n: t.detach().cpu().contiguous() for n, t in adapter.items()}, staged / ADAPTER, {"format": "pt"}
            )
            if optimizer is not None:
                save_file({n: t.detach().cpu().contiguous() for n, t in optimizer.items()}, staged / OPTIMIZER)
            for path in staged.iterdir():
                fsync_io.fsync_path(path)
            sums = {path.name: fsync_io.sha256(path) for path in sorted(staged.iterdir())}
            size = sum(path.stat().st_size for path in staged.iterdir())
            fsync_io.write_new(staged / RECORD, _json(asdict(replace(record, files=sums, size_bytes=size))))
            fsync_io.fsync_path(staged)
            failpoint("tinker.before_rename")
            if folder.exists():
                os.replace(folder, staged.with_name(f"{staged.name}.old"))
            os.replace(staged, folder)
            fsync_io.fsync_path(folder.parent)
            shutil.rmtree(staged.with_name(f"{staged.name}.old"), ignore_errors=True)
        except OSError as error:
            shutil.rmtree(staged, ignore_errors=True)
            raise StorageError(f"cannot write {checkpoint}: {fsync_io.error_reason(error)}") from error

    def read(
        self, checkpoint: CheckpointPath, *, optimizer: bool
    ) -> tuple[CheckpointRecord, dict[str, Tensor], dict[str, Tensor]]:
        """The record, the adapter's tensors and those of the optimizer, all on the CPU.

        Raises NotFoundError, CheckpointError for damage, DataError if the optimizer's state was not saved.
        """
        record, folder = self.record(checkpoint), self.path(checkpoint)
        if optimizer and record.optimizer is None:
            raise DataError(f"{checkpoint} has no optimizer state; load it with optimizer=False")
        try:
            wrong = [name for name, digest in (record.files or {}).items() if fsync_io.sha256(folder / name) != digest]
            if wrong:
                raise CheckpointError(f"{checkpoint}: {wrong[0]} is damaged; load an earlier checkpoint")
            return record, load_file(folder / ADAPTER), load_file(folder / OPTIMIZER) if optimizer else {}
        except OSError as error:
            raise CheckpointError(f"{checkpoint} cannot be read: {fsync_io.error_reason(error)}") from error


def _json(value: object) -> bytes:
    return json.dumps(value, indent=1, default=list).encode() + b"\n"


def check_name(name: str) -> str:
    """The name of a checkpoint. Raises DataError for one that is no plain file name."""
    if not NAME.fullmatch(name):
        raise DataError(f"the name '{name}' is not supported; use letters, digits, '.', '_' and '-'")
    return name


def check_ttl(seconds: int | None) -> int | None:
    """The seconds that a checkpoint is kept; None = for ever. Raises DataError."""
    if seconds is not None and not 1 <= int(seconds) <= LONGEST_TTL_S:
        raise DataError(f"ttl_seconds={seconds}: expected 1 second to 10 years")
    return None if seconds is None else int(seconds)
