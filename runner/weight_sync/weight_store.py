"""Versions of a model's weights in files that samplers read: written tensor by tensor, mapped lazily.

    tensors ──64 MiB at a time──▶ .staging-… ──renamed──▶ fixed-0000.safetensors …   the same in every version
                                                          v7-0000.safetensors …      those of version 7

While a file is written the tensors of the next one are made, and those of a version that was dropped are written over
(see below). A version is always complete, so that a sampler that restarts needs nothing else. Its digest
(`weight_checksum`) identifies it.

A file is written aside and renamed, over the memory of a file no longer in use.

    new     .staging-v8-0000 ──written──▶ v8-0000.safetensors
    spare   v7-0000 ──renamed when unused──▶ .staging-spare-… ──leased──▶ written over ──▶ v8-0000.safetensors

To free memory and allocate other memory takes twice as long as to write it. But a process may still read the old
file, so it is overwritten only if no process has it open: it has no other name (a hard link), and the kernel grants a
write lease (fcntl(2), F_SETLEASE), which it does for a file that is open nowhere else; a mapped file counts as open.
The lease is held during the write; a process that opens the file then waits until the lease ends.
"""

from __future__ import annotations

import fcntl
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from runner.core.errors import StorageError
from runner.core.fsync_io import STAGED, error_reason, format_bytes, free_bytes
from runner.core.safetensors_layout import TYPES, compute_layout
from runner.weight_sync.store_dir import ReservedDir
from runner.weight_sync.weight_checksum import (
    TensorDigests,
    byte_chunks,
    chunk_digest,
    combine_digests,
    tensor_digest,
    tensor_digests,
)


def supports_leases(folder: Path) -> bool:
    """Whether this disk can report that no process has a file open; tests it. Raises OSError.

    Some know no leases, and the layered one of a container grants them for what is mapped.
    """
    path = folder / f"{STAGED}trial"
    write_file(path, {"trial": torch.zeros(1)}, {}, None)
    handle = os.open(path, os.O_RDWR)
    try:
        with safe_open(path, "pt") as file:
            mapped = file.get_tensor("trial")
        del file  # which has it open; the tensor has it mapped
        refused = not _take_lease(handle)
        del mapped
        return refused and _take_lease(handle)
    finally:
        _release(handle)
        path.unlink()


def write_file(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], spare: Path | None
) -> dict[str, bytes]:
    """Write a safetensors file of contiguous CPU tensors; returns their digests. Raises OSError.

    `spare` is used up.
    """
    layout = compute_layout({name: (TYPES[one.dtype], tuple(one.shape)) for name, one in tensors.items()}, metadata)
    staged = path.with_name(f"{STAGED}{path.name}")
    digests: dict[str, bytes] = {}
    try:
        handle = _open_for_writing(staged, spare)
        try:
            _write(handle, memoryview(layout.head))
            for name in sorted(tensors, key=lambda name: layout.byte_ranges[name]):
                digests[name] = tensor_digest(
                    name, tensors[name], [_write_and_digest(handle, one) for one in byte_chunks(tensors[name])]
                )
            os.ftruncate(handle, len(layout.head) + layout.num_bytes)
        finally:
            _release(handle)
        os.replace(staged, path)
    finally:
        staged.unlink(missing_ok=True)
    return digests


def _open_for_writing(path: Path, spare: Path | None) -> int:
    """A file to be written from its beginning: the spare one if no other process uses it, else a new one."""
    if spare is not None:
        handle = os.open(spare, os.O_RDWR)
        if _take_lease(handle):
            spare.rename(path)
            return handle
        _release(handle)
        spare.unlink()
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)


def _take_lease(handle: int) -> bool:
    """Whether no other process uses a file: true = it stays so until `_release`."""
    with suppress(OSError):  # somebody has it, or this disk knows no leases
        fcntl.fcntl(handle, fcntl.F_SETSIG, signal.SIGURG)  # which is ignored; the usual one would end this process
        fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        return os.fstat(handle).st_nlink == 1
    return False


def _release(handle: int) -> None:
    """Close a file, and give up its lease: a process that was forked meanwhile would have that, too."""
    with suppress(OSError):  # this disk knows no leases
        fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    os.close(handle)


def _write_and_digest(handle: int, piece: memoryview) -> bytes:
    _write(handle, piece)
    return chunk_digest(piece)


def _write(handle: int, content: memoryview) -> None:
    while content:
        content = content[os.write(handle, content) :]


FILE_BYTES = 64 * 2**20  # of a file, unless one tensor is larger
WRITERS = min(2, os.cpu_count() or 1)  # files that are written at once, beside the one whose tensors are being made
KIND, FIXED, CHANGED = "runner", "fixed", "changed"  # in a file's metadata: what it holds
REMEMBERED = 4096  # files whose digests are


class StoredWeights(Mapping[str, Tensor]):
    """One version of the weights, all of it. A tensor is read at its first use, and then only mapped.

    digest: as it was made; None = to be computed from what the files hold, at its first use
    changed: the names that may differ from version to version; the others are the same in all versions of an attempt
    """

    def __init__(self, files: Sequence[Path], version: int, digest: str | None = None) -> None:
        """Read the files' headers. Raises OSError or SafetensorError for missing or damaged files."""
        self.files, self.version = tuple(files), version
        self._digest = digest
        self._paths: dict[str, Path] = {}
        self._changing: list[Path] = []  # the files of this version alone
        self._mapped: dict[Path, Any] = {}  # those that were digested, so that the next to read finds their pages
        for path in self.files:
            with safe_open(path, "pt") as file:
                self._paths.update(dict.fromkeys(file.keys(), path))
                if (file.metadata() or {}).get(KIND) != FIXED:
                    self._changing.append(path)
        self.changed = frozenset(name for name, path in self._paths.items() if path in self._changing)

    @property
    def digest(self) -> str:
        """What these weights are; equal for equal names, types, shapes and bytes."""
        if self._digest is None:
            self._digest = self.compute_digest()
        return self._digest

    @property
    def file_names(self) -> dict[str, str]:
        """The name of each tensor's file."""
        return {name: path.name for name, path in self._paths.items()}

    @property
    def num_changed_bytes(self) -> int:
        """Size of those of this version alone."""
        return sum(path.stat().st_size for path in self._changing)

    def compute_digest(self) -> str:
        """The digest of what the files hold now; of those that all versions share it is remembered.

        The others stay mapped as long as this is there: to map them once more takes longer than to digest them.
        """
        known: dict[str, bytes] = {}
        for path in self.files:
            if path in self._changing:
                self._mapped[path] = safe_open(path, "pt")
                continue
            status = path.stat()
            known.update(_file_digests(path, status.st_ino, status.st_size, status.st_mtime_ns))
        return combine_digests(known | tensor_digests({name: self[name] for name in self if name in self.changed}))

    def __getitem__(self, name: str) -> Tensor:
        path = self._paths[name]
        file = self._mapped.get(path) or safe_open(path, "pt")
        found: Tensor = file.get_tensor(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


class WeightStore:
    """The versions that samplers may still request.

    `put` belongs to the thread that trains; `get` may be called from another one.
    """

    def __init__(self, reserved: ReservedDir) -> None:
        """Raises StorageError where nothing can be written."""
        self._reserved: ReservedDir | None = reserved
        self.folder = reserved.folder
        self._fixed: list[Path] = []
        self._fixed_digests: TensorDigests = {}
        self._versions: dict[int, tuple[StoredWeights, list[Path]]] = {}
        self._spare: list[Path] = []  # files that are to be written over
        self._lock = threading.Lock()
        try:
            self._spares = supports_leases(self.folder)
        except OSError as error:
            raise self._full("to be", error) from error

    def keep(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Write what is the same in every version, before the first of them. Raises as `put`."""
        self._fixed, self._fixed_digests = self._write_files(FIXED, tensors)

    def put(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> StoredWeights:
        """Write a version: what may have changed of it. Needs WRITERS + 1 times FILE_BYTES, and a tensor.

        What is raised is raised after all tensors were taken, as others may hold pieces of them. Raises StorageError
        where there is no room, ValueError for a tensor that was said to stay the same.
        """
        files, digests = self._write_files(f"v{version}", tensors)
        if twice := digests.keys() & self._fixed_digests.keys():
            raise ValueError(f"version {version} has {len(twice)} tensors that were declared constant: {min(twice)}")
        whole = combine_digests({**self._fixed_digests, **digests})
        made = StoredWeights([*self._fixed, *files], version, whole)
        with self._lock:
            self._versions[version] = made, files
        return made

    def get(self, version: int) -> StoredWeights:
        """A version that was put and not dropped."""
        with self._lock:
            return self._versions[version][0]

    def drop_below(self, version: int) -> None:
        """Remove older versions; who has one mapped keeps it. The next one overwrites the others if it can."""
        with self._lock:
            old = [self._versions.pop(one)[1] for one in sorted(self._versions) if one < version]
        for path in [path for files in old for path in files if path.exists()]:
            if self._spares:
                # without its name no process opens it again
                self._spare.append(path.rename(path.with_name(f"{STAGED}spare-{path.name}")))
            else:
                path.unlink()

    def close(self) -> None:
        """Remove everything."""
        if self._reserved is not None:
            self._reserved.release()
            self._reserved = None

    def _write_files(self, stem: str, tensors: Iterable[tuple[str, Tensor]]) -> tuple[list[Path], dict[str, bytes]]:
        """Write tensors as files that begin with `stem`; these, and the tensors' digests."""
        rest, files, digests = iter(tensors), list[Path](), dict[str, bytes]()
        kind = {KIND: FIXED if stem == FIXED else CHANGED}
        try:
            with ThreadPoolExecutor(WRITERS) as pool:
                pending: list[Future[dict[str, bytes]]] = []
                for group in _groups(rest):
                    files.append(self.folder / f"{stem}-{len(files):04d}.safetensors")
                    spare = self._spare.pop(0) if self._spare else None
                    pending.append(pool.submit(write_file, files[-1], group, kind, spare))
                    del group  # or it would be there while the next one is made
                    while len(pending) > WRITERS:
                        digests.update(pending.pop(0).result())
                for one in pending:
                    digests.update(one.result())
            return files, digests
        except Exception as error:
            for _ in rest:
                pass
            for path in files:
                path.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise self._full(stem, error) from error
            raise
        finally:
            while self._spare:  # not needed: this version is smaller, or failed
                self._spare.pop().unlink()

    def _full(self, stem: str, error: OSError) -> StorageError:
        return StorageError(
            f"cannot write the weights {stem} for the samplers into {self.folder}: {error_reason(error)} "
            f"({format_bytes(free_bytes(self.folder))} free); free space there (df -h /dev/shm; --shm-size sets it for "
            "a container), then type: run resume"
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


@lru_cache(REMEMBERED)
def _file_digests(path: Path, inode: int, size: int, mtime_ns: int) -> TensorDigests:
    """The digests of the tensors in a file; the other arguments say that it is still the same one."""
    with safe_open(path, "pt") as file:
        return tensor_digests({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
