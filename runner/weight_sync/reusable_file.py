"""A file of the weight store: written aside and renamed, over the memory of a file no longer in use.

    new     .staging-v8-0000 ──written──▶ v8-0000.safetensors
    spare   v7-0000 ──renamed, as nobody wants it──▶ .staging-spare-… ──leased──▶ written over ──▶ v8-0000.safetensors

To give memory back and be given other memory takes twice as long as to write it. But who has the old file may still
read it, so it is written over only if nobody has: it has no other name (a hard link), and the kernel grants a write
lease (fcntl(2), F_SETLEASE), which it does for a file that is open nowhere else; what is mapped counts as open. The
lease is held while it is written, and who comes upon it then waits for its end.
"""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from runner.core.fsync_io import STAGED
from runner.core.safetensors_layout import TYPES, compute_layout
from runner.weight_sync.weight_checksum import byte_chunks, chunk_digest, tensor_digest


def supports_leases(folder: Path) -> bool:
    """Whether this disk can say that nobody has a file open, which is tried out. Raises OSError.

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


def set_aside(path: Path) -> Path:
    """Take its name from a file, so that nobody opens it any more; a spare."""
    return path.rename(path.with_name(f"{STAGED}spare-{path.name}"))


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
    """A file to be written from its beginning: the spare one if it is nobody else's, else a new one."""
    if spare is not None:
        handle = os.open(spare, os.O_RDWR)
        if _take_lease(handle):
            spare.rename(path)
            return handle
        _release(handle)
        spare.unlink()
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)


def _take_lease(handle: int) -> bool:
    """Whether a file is nobody else's: true = it stays so until `_release`."""
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
