"""Versions of a model's weights in files that samplers read: written tensor by tensor, mapped lazily.

    tensors ──64 MiB at a time──▶ .staging-… ──renamed──▶ fixed-0000.safetensors …   the same in every version
                                                          v7-0000.safetensors …      those of version 7

A digest says what the weights are, wherever they lie: of each tensor's bytes, then of all names, types and shapes with
these. A version is always complete, so that a sampler that comes back empty needs nothing but it.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from runner.durable import STAGED, human, reason
from runner.errors import StorageError
from runner.shelf_folder import Claim
from runner.tensor_file import TYPES, arranged

FILE_BYTES = 64 * 2**20  # of a file, unless one tensor is larger; as much is held while it is written
PIECE_BYTES = 8 * 2**20  # of a tensor that one thread digests at once
THREADS = min(8, os.cpu_count() or 1)
KIND, FIXED = "runner", "fixed"  # in a file's metadata: what it holds
REMEMBERED = 4096  # files whose digests are

Digests = Mapping[str, bytes]  # of each tensor: what it is called, and what it is


class Shelved(Mapping[str, Tensor]):
    """One version of the weights, all of it. A tensor is read when it is asked for, and then only mapped.

    digest: as it was made; None = to be computed from what the files hold, when it is first asked for
    changed: the names that may differ from version to version; the others are the same in all versions of an attempt
    """

    def __init__(self, files: Sequence[Path], version: int, digest: str | None = None) -> None:
        """Reads the files' headers. Raises OSError or SafetensorError for files that are not there, or damaged."""
        self.files, self.version = tuple(files), version
        self._digest = digest
        self._places: dict[str, Path] = {}
        self._changing: list[Path] = []  # the files of this version alone
        for path in self.files:
            with safe_open(path, "pt") as file:
                self._places.update(dict.fromkeys(file.keys(), path))
                if (file.metadata() or {}).get(KIND) != FIXED:
                    self._changing.append(path)
        self.changed = frozenset(name for name, path in self._places.items() if path in self._changing)

    @property
    def digest(self) -> str:
        """What these weights are; equal for equal names, types, shapes and bytes."""
        if self._digest is None:
            self._digest = self.found()
        return self._digest

    @property
    def num_changed_bytes(self) -> int:
        """Size of those of this version alone."""
        return sum(path.stat().st_size for path in self._changing)

    def found(self) -> str:
        """The digest of what the files hold now; of those that all versions share it is remembered."""
        known: dict[str, bytes] = {}
        for path in self.files:
            status = path.stat()
            same = path, status.st_ino, status.st_size, status.st_mtime_ns
            known.update(_of_file(path) if path in self._changing else _remembered(*same))
        return _combined(known)

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self._places[name], "pt") as file:
            found: Tensor = file.get_tensor(name)
            return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """The digest of weights that are no files, on whatever device; 8 MiB of them at a time go through the host."""
    with ThreadPoolExecutor(THREADS) as pool:
        return _combined({name: _digest(name, tensor, pool) for name, tensor in tensors.items()})


class Shelf:
    """The versions that samplers may still ask for. `put` belongs to the thread that trains; `get` may be called from
    another one."""

    def __init__(self, claim: Claim) -> None:
        self._claim: Claim | None = claim
        self.folder = claim.folder
        self._fixed: list[Path] = []
        self._fixed_digests: Digests = {}
        self._versions: dict[int, tuple[Shelved, list[Path]]] = {}
        self._lock = threading.Lock()

    def keep(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Write what is the same in every version, before the first of them. Raises as `put`."""
        self._fixed, self._fixed_digests = self._written(FIXED, tensors)

    def put(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> Shelved:
        """Write a version: what may have changed of it. Held meanwhile are FILE_BYTES and a tensor.

        What is raised is raised after all tensors were taken, as others may hold pieces of them. Raises StorageError
        where there is no room, ValueError for a tensor that was said to stay the same.
        """
        files, digests = self._written(f"v{version}", tensors)
        if twice := digests.keys() & self._fixed_digests.keys():
            raise ValueError(f"{len(twice)} tensors were to stay the same and are in version {version}: {min(twice)}")
        whole = _combined({**self._fixed_digests, **digests})
        made = Shelved([*self._fixed, *files], version, whole)
        with self._lock:
            self._versions[version] = made, files
        return made

    def get(self, version: int) -> Shelved:
        """A version that was put and not dropped."""
        with self._lock:
            return self._versions[version][0]

    def drop_below(self, version: int) -> None:
        """Remove older versions; who has one mapped keeps it."""
        with self._lock:
            old = [self._versions.pop(one) for one in sorted(self._versions) if one < version]
        for _, files in old:
            for path in files:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove everything."""
        if self._claim is not None:
            self._claim.release()
            self._claim = None

    def _written(self, stem: str, tensors: Iterable[tuple[str, Tensor]]) -> tuple[list[Path], dict[str, bytes]]:
        """Write tensors as files that begin with `stem`; these, and the tensors' digests."""
        rest, files, digests = iter(tensors), list[Path](), dict[str, bytes]()
        try:
            with ThreadPoolExecutor(THREADS) as pool:
                for group in _groups(rest):
                    path = self.folder / f"{stem}-{len(files):04d}.safetensors"
                    files.append(path)
                    found = {name: _submitted(tensor, pool) for name, tensor in group.items()}
                    _write(path, group, {KIND: stem})
                    digests.update({name: _named(name, group[name], found[name]) for name in group})
                    del group  # or it would be there while the next one is made
            return files, digests
        except Exception as error:
            for _ in rest:
                pass
            for path in files:
                path.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise self._full(stem, error) from error
            raise

    def _full(self, stem: str, error: OSError) -> StorageError:
        room = human(os.statvfs(self.folder).f_bavail * os.statvfs(self.folder).f_frsize) if self.folder.is_dir() else 0
        return StorageError(
            f"cannot write the weights {stem} for the samplers into {self.folder}: {reason(error)} ({room} left); make "
            "room there (df -h /dev/shm; a container's is set by --shm-size), then: run resume"
        )


def _groups(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Runs of tensors on the CPU, of at most FILE_BYTES or one tensor."""
    held: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if held and sum(one.nbytes for one in held.values()) + tensor.nbytes > FILE_BYTES:
            yield held
            held = {}
        held[name] = tensor.detach().cpu().contiguous()
    if held:
        yield held


def _write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """A safetensors file, written aside and renamed."""
    entries = {name: (TYPES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}
    layout = arranged(entries, metadata)
    staged = path.with_name(f"{STAGED}{path.name}")
    try:
        with staged.open("wb") as file:
            file.write(layout.head)
            for name in sorted(tensors, key=lambda name: layout.places[name]):
                file.write(_bytes(tensors[name]))
        os.replace(staged, path)
    finally:
        staged.unlink(missing_ok=True)


def _bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, in its own memory."""
    view: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return view


def _submitted(tensor: Tensor, pool: ThreadPoolExecutor) -> list[Any]:
    """The digests to be of a tensor's pieces."""
    whole = _bytes(tensor)
    pieces = [whole[at : at + PIECE_BYTES] for at in range(0, max(len(whole), 1), PIECE_BYTES)]
    return [pool.submit(lambda piece: hashlib.blake2b(piece, digest_size=32).digest(), piece) for piece in pieces]


def _named(name: str, tensor: Tensor, pieces: Sequence[Any]) -> bytes:
    """What a tensor is called, and what it is."""
    bytes_ = hashlib.blake2b(b"".join(piece.result() for piece in pieces), digest_size=32).hexdigest()
    return f"{name} {TYPES[tensor.dtype]} {list(tensor.shape)} {bytes_}\n".encode()


def _digest(name: str, tensor: Tensor, pool: ThreadPoolExecutor) -> bytes:
    host = tensor.detach().cpu().contiguous()
    return _named(name, host, _submitted(host, pool))


def _combined(digests: Digests) -> str:
    """One digest of all, the same in every order."""
    return hashlib.blake2b(b"".join(digests[name] for name in sorted(digests)), digest_size=32).hexdigest()


@lru_cache(REMEMBERED)
def _remembered(path: Path, inode: int, size: int, mtime_ns: int) -> Digests:
    """`_of_file`; the other arguments say that it is still the same file."""
    return _of_file(path)


def _of_file(path: Path) -> Digests:
    """The digests of the tensors in a file."""
    with safe_open(path, "pt") as file, ThreadPoolExecutor(THREADS) as pool:
        return {name: _digest(name, file.get_tensor(name), pool) for name in file.keys()}  # noqa: SIM118
