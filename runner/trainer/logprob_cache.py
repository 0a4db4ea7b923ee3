"""Log-probabilities that are kept on disk, by what they are of: a unit's tokens and how they hang together.

    units of a batch ──sha256 of ids, positions, parents──▶ keys
    key, log-probabilities ──64 MiB at a time──▶ <folder>/<sha256 of the file>.safetensors ──▶ looked up again

A file is written aside and renamed, so that it is whole or not there, and one that is open stays readable after its
folder was deleted; its name is the checksum of its bytes, so that
one that was damaged later is found out, and its units are unknown again. Two processes may fill one folder at once.

Legend: T tokens, U units of a file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from runner.core import fsync_io
from runner.core.batch import Batch, unit_spans
from runner.core.errors import StorageError

DIGEST_BYTES = 32
TOKENS_PER_FILE = 2**24  # of float32: 64 MiB


class KeptLogprobs:
    """The log-probabilities of a folder; what is asked for is read from its files, which stay there.

    report: hears of each damaged file, which is removed.
    """

    def __init__(self, folder: Path, report: Callable[[str], None]) -> None:
        """Raises StorageError where the folder cannot be made or read."""
        self.folder = folder
        self._places: dict[bytes, tuple[int, int, int]] = {}  # key → (file, first token, tokens)
        self._files: list[Any] = []
        self._new: dict[bytes, Tensor] = {}
        self._tokens = 0
        with self._worded():
            folder.mkdir(parents=True, exist_ok=True)
            fsync_io.sweep(folder)
            for path in sorted(folder.glob("*.safetensors")):
                with suppress(FileNotFoundError):  # another process found the damage first
                    if _sha256(path.read_bytes()) == path.stem:
                        self._open(path)
                    else:
                        report(f"{path} does not have the checksum that it is named by")
                        path.unlink()

    def __contains__(self, key: bytes) -> bool:
        return key in self._places or key in self._new

    def __getitem__(self, key: bytes) -> Tensor:
        """float32 [T] of a unit. Raises KeyError for one that is not known or has not been written yet."""
        file, first, size = self._places[key]
        values: Tensor = self._files[file].get_slice("values")[first : first + size]
        return values

    def add(self, key: bytes, values: Tensor) -> None:
        """Keep float [T] of a unit. Raises StorageError where a file that is full cannot be written."""
        self._new[key] = values.detach().float().clone()
        self._tokens += len(values)
        if self._tokens >= TOKENS_PER_FILE:
            self.write()

    def write(self) -> None:
        """Put on disk what was added. Raises StorageError."""
        if not self._new:
            return
        keys = np.frombuffer(b"".join(self._new), dtype=np.uint8).reshape(-1, DIGEST_BYTES)
        content = save(
            {
                "keys": torch.from_numpy(keys.copy()),
                "lengths": torch.tensor([len(values) for values in self._new.values()]),
                "values": torch.cat(list(self._new.values())),
            }
        )
        path = self.folder / f"{_sha256(content)}.safetensors"
        with self._worded():
            self.folder.mkdir(parents=True, exist_ok=True)  # a cache may be deleted at any time
            fsync_io.replace_whole(path, content)
            self._open(path)
        self._new, self._tokens = {}, 0

    def _open(self, path: Path) -> None:
        file: Any = safe_open(path, "pt")
        lengths = file.get_tensor("lengths")
        firsts = (torch.cumsum(lengths, 0) - lengths).tolist()
        digests = file.get_tensor("keys").numpy().tobytes()
        keys = (digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES))
        places = ((len(self._files), first, size) for first, size in zip(firsts, lengths.tolist(), strict=True))
        self._places.update(zip(keys, places, strict=True))
        self._files.append(file)

    @contextmanager
    def _worded(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(
                f"cannot keep log-probabilities in {self.folder}: {error.strerror or error}; free space, set "
                "RUNNER_CACHE to a folder elsewhere, or type algorithm.reference=copy"
            ) from error


def unit_keys(batch: Batch) -> list[bytes]:
    """What each unit's log-probabilities are a function of, as a sha256: its ids, positions and parents."""
    tokens = batch.structure.tokens
    ids, positions, parents = (tokens[name].numpy() for name in ("ids", "positions", "parent"))
    keys, first = list[bytes](), 0
    for *_, size in unit_spans(batch):
        span = slice(first, first + size)
        own = np.where(parents[span] < 0, -1, parents[span] - first)
        keys.append(hashlib.sha256(np.stack([ids[span], positions[span], own]).tobytes()).digest())
        first += size
    return keys


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
