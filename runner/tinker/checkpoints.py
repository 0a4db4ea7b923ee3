"""Checkpoints of training clients on the disk, below `clients/` of the run folder.

    clients/<session>-train-<n>/client.json                 who it is: base, LoRA, metadata, owner
                               /weights/<name>/             a PEFT adapter, and the optimizer's state
                               /sampler_weights/<name>/     a PEFT adapter
    tinker://<session>:train:<n>/weights/<name>             what clients call the second one

Each is written to a staging folder, flushed and renamed; checkpoint.json has the SHA-256 of every file. An adapter that
was never named (sampler weights without a name) is kept for a day.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from runner.core import fsync_io
from runner.core.errors import CheckpointError, DataError
from runner.model.model_folder import ADAPTER_WEIGHTS
from runner.run_dir.folder import read_mapping, write_json

SCHEME = "tinker://"
KINDS = {"weights": "training", "sampler_weights": "sampler"}
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
RECORD, OPTIMIZER = "checkpoint.json", "optimizer.safetensors"
UNNAMED = "unnamed-"
UNNAMED_S = 24 * 3600
MAX_TTL_S = 10 * 366 * 24 * 3600


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


def expiry(ttl_s: int | None) -> str | None:
    """When a checkpoint expires that is kept for some seconds; None = never. Raises DataError."""
    if ttl_s is None:
        return None
    if not 1 <= int(ttl_s) <= MAX_TTL_S:
        raise DataError(f"ttl_seconds={ttl_s}: expected 1 second to 10 years")
    return now_text(int(ttl_s))


@dataclass(frozen=True, slots=True)
class CheckpointPath:
    """`tinker://model_id/kind/name`. Raises DataError for a name that is no plain file name."""

    model_id: str
    kind: str
    name: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS or not NAME.fullmatch(self.name):
            raise DataError(f"the name '{self.name}' is not supported; use letters, digits, '.', '_' and '-'")

    @classmethod
    def parse(cls, text: str) -> CheckpointPath:
        """Raises DataError for another form."""
        parts = text.removeprefix(SCHEME).split("/")
        if not text.startswith(SCHEME) or len(parts) != 3:
            raise DataError(f"'{text}' is not the path of a checkpoint; expected {SCHEME}RUN/weights/NAME")
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
        with fsync_io.storage_errors(f"cannot write {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "client.json", asdict(record))

    def find_client(self, model_id: str, owner: str) -> ClientRecord:
        """Raises NotFoundError, also where another key owns it."""
        found = read_mapping(self.folder(model_id) / "client.json")
        if found.get("owner") != owner:
            raise NotFoundError(f"no training client '{model_id}'")
        return ClientRecord(**{**found, "lora": LoraSettings(**found["lora"])})

    def clients(self, owner: str) -> list[ClientRecord]:
        """Those of a key, the newest first."""
        found = []
        for path in self._root.glob("*/client.json"):
            with suppress(NotFoundError):  # of another key
                found.append(self.find_client(re.sub(r"-train-(\d+)$", r":train:\1", path.parent.name), owner))
        return sorted(found, key=lambda one: (one.created, one.model_id), reverse=True)

    def checkpoints(self, model_id: str) -> list[tuple[CheckpointPath, CheckpointRecord]]:
        """Those of a client that have a name and are not expired, the newest first."""
        paths = [path.parent for kind in KINDS for path in (self.folder(model_id) / kind).glob(f"*/{RECORD}")]
        named = [path for path in paths if not path.name.startswith((UNNAMED, "."))]
        every = [CheckpointPath(model_id, path.parent.name, path.name) for path in named]
        found = [(one, record) for one in every if not (record := self.record(one)).is_expired]
        return sorted(found, key=lambda one: one[1].created, reverse=True)

    def record(self, checkpoint: CheckpointPath) -> CheckpointRecord:
        """Raises NotFoundError."""
        if not (found := read_mapping(self.path(checkpoint) / RECORD)):
            raise NotFoundError(f"there is no checkpoint {checkpoint}")
        return CheckpointRecord(**found)

    def set_expiry(self, checkpoint: CheckpointPath, expires: str | None) -> None:
        """Change when it expires; None = never. Raises NotFoundError, StorageError."""
        write_json(self.path(checkpoint) / RECORD, asdict(replace(self.record(checkpoint), expires=expires)))

    def delete(self, checkpoint: CheckpointPath) -> None:
        """Raises NotFoundError."""
        self.record(checkpoint)
        self._delete(self.path(checkpoint))

    def _delete(self, folder: Path) -> None:
        gone = _staging_path(folder)
        os.replace(folder, gone)
        shutil.rmtree(gone)

    def remove_leftovers(self) -> None:
        """Delete what a killed server left half written; put back what it was replacing."""
        for staged in self._root.glob(f"*/*/{fsync_io.STAGED}*"):
            shutil.rmtree(staged)
        for old in self._root.glob(f"*/*/{fsync_io.REPLACED}*"):
            fsync_io.recover_folder(old.with_name(old.name.removeprefix(fsync_io.REPLACED)))

    def delete_expired(self) -> list[str]:
        """Delete all whose TTL has passed; returns their paths."""
        found = [path.parent for path in self._root.glob(f"*/*/[!.]*/{RECORD}")]
        records = {one: read_mapping(one / RECORD) for one in found}  # empty for one that is being replaced
        expired = [one for one, record in records.items() if record and CheckpointRecord(**record).is_expired]
        for folder in expired:
            self._delete(folder)
        return list(map(str, expired))

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
        staged = _staging_path(folder)
        with fsync_io.storage_errors(f"cannot write {folder}", errors=(OSError, SafetensorError)):
            try:
                staged.mkdir(parents=True)
                config.save_pretrained(str(staged))
                for name, tensors in ((ADAPTER_WEIGHTS, adapter), (OPTIMIZER, optimizer)):
                    if tensors is not None:
                        own = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
                        save_file(own, staged / name, {"format": "pt"})
                files = sorted(staged.iterdir())
                for path in files:
                    fsync_io.fsync_path(path)
                sizes, sums = sum(p.stat().st_size for p in files), {p.name: fsync_io.sha256(p) for p in files}
                write_json(staged / RECORD, asdict(replace(record, files=sums, size_bytes=sizes)))
                fsync_io.replace_folder(staged, folder)
            finally:
                shutil.rmtree(staged, ignore_errors=True)

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
                raise CheckpointError(f"{checkpoint}: {wrong[0]} is corrupted; load an earlier checkpoint")
            return record, load_file(folder / ADAPTER_WEIGHTS), load_file(folder / OPTIMIZER) if optimizer else {}
        except OSError as error:
            raise CheckpointError(f"{checkpoint} cannot be read: {fsync_io.error_reason(error)}") from error


def _staging_path(folder: Path) -> Path:
    """A new name beside a folder, which no checkpoint has."""
    return folder.with_name(f"{fsync_io.STAGED}{folder.name}.{secrets.token_hex(4)}")
