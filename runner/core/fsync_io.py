"""Files that are on the disk, not only in its cache, once a function returns."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import shutil
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path

FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up"}
STAGED = ".staging-"
STALE = timedelta(hours=1)  # another process may be writing what is younger
OS_ERROR = re.compile(r"\(os error ([0-9]+)\)")  # how safetensors passes an errno on


def sync(path: Path) -> None:
    """Flush a file, or a folder's list of names, to the disk. Raises OSError where that fails."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_new(path: Path, content: bytes) -> None:
    """Write and flush a file that must not exist yet."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_whole(path: Path, content: bytes) -> None:
    """Put `content` at `path` so that a reader, or a crash, sees the old file or the new one and nothing else.

    Raises OSError where that fails; the old file is then untouched and nothing is left beside it.
    """
    staged = path.with_name(f"{STAGED}{path.name}.{secrets.token_hex(4)}")
    try:
        write_new(staged, content)
        os.replace(staged, path)
        sync(path.parent)
    finally:
        staged.unlink(missing_ok=True)


def sweep(folder: Path) -> None:
    """Remove what `replace_whole` left in a folder where its process was killed. Raises OSError."""
    for path in folder.glob(f"{STAGED}*"):
        with suppress(FileNotFoundError):  # another process was faster
            if datetime.now() - datetime.fromtimestamp(path.stat().st_mtime) > STALE:
                path.unlink()


def sha256(path: Path) -> str:
    """The hex digest of a file, read in blocks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def free_bytes(folder: Path) -> int:
    """What this user may still write to the disk that `folder` is, or would be, on."""
    return shutil.disk_usage(_existing(folder)).free


def inodes_left(folder: Path) -> bool:
    """Whether another few files can be made, where the file system counts them."""
    status = os.statvfs(_existing(folder))
    return status.f_files == 0 or status.f_favail > 4


def reason(error: Exception) -> str:
    """Why an operation failed, in words."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (said := OS_ERROR.search(str(error))):
        number = int(said[1])
    return str(error) if number is None else FULL.get(number) or os.strerror(number)


def human(num_bytes: int) -> str:
    """A size as people read it, e.g. 3.2 MiB."""
    size = float(num_bytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.1f} {unit}" if unit != "bytes" else f"{num_bytes} bytes"
        size /= 1024
    return f"{size:.1f} TiB"


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return folder if folder.exists() else _existing(folder.parent)
