"""Durable files, fault injection points, and folders for temporary files. Nothing here imports torch.

When a function returns, the file is on the disk and not only in the page cache.

    RUNNER_FAILPOINT=checkpoint.before_rename:kill              SIGKILL there; free when the variable is unset
    RUNNER_FAILPOINT=checkpoint.write:ENOSPC                    OSError there, with any name of `errno`
    <temporary files>/run-engine-<hash of the folder's path>    files by which workers meet, sockets

vLLM leaves these files if it is killed, and some of them always. On the CPU its workers also use shared memory with the
names of these files, which remains too.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import os
import re
import secrets
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path

from runner.core.errors import StorageError

FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up"}
TOO_LARGE = {errno.EFBIG: "the file is larger than this shell (ulimit -f) or the file system allows"}
STAGED, REPLACED = ".staging-", ".replaced-"
STALE = timedelta(hours=1)  # a younger file may be in use by another process
OS_ERROR = re.compile(r"\(os error ([0-9]+)\)")  # the form of an errno in safetensors' errors


def fsync_path(path: Path) -> None:
    """Flush a file, or a folder's entries, to the disk. Raises OSError."""
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


def atomic_write(path: Path, content: bytes) -> None:
    """Write `content` to `path` atomically: a reader, or a crash, sees the old file or the new one.

    Raises OSError; the old file is then unchanged and no other file remains.
    """
    staged = path.with_name(f"{STAGED}{path.name}.{secrets.token_hex(4)}")
    try:
        write_new(staged, content)
        os.replace(staged, path)
        fsync_path(path.parent)
    finally:
        staged.unlink(missing_ok=True)


def replace_folder(staged: Path, target: Path) -> None:
    """Put a folder that is written in the place of `target`, which may exist. Raises OSError.

    A crash leaves one of the two at `target`, or none until `recover_folder`.
    """
    old = target.with_name(f"{REPLACED}{target.name}")
    recover_folder(target)
    failpoint("replace_folder.before_renames")
    if target.exists():
        os.rename(target, old)
    try:
        failpoint("replace_folder.between_renames")
        os.rename(staged, target)
        fsync_path(target.parent)
        failpoint("replace_folder.after_renames")
    finally:
        recover_folder(target)


def recover_folder(target: Path) -> None:
    """Finish a `replace_folder` that was interrupted: put the older folder back without the newer."""
    old = target.with_name(f"{REPLACED}{target.name}")
    if old.exists() and not target.exists():
        os.rename(old, target)
    elif old.exists():
        shutil.rmtree(old)


def remove_leftovers(folder: Path) -> None:
    """Remove files that a killed `atomic_write` left in a folder. Raises OSError."""
    for path in folder.glob(f"{STAGED}*"):
        with suppress(FileNotFoundError):  # another process has removed it
            if datetime.now() - datetime.fromtimestamp(path.stat().st_mtime) > STALE:
                path.unlink()


def sha256(path: Path) -> str:
    """The hex digest of a file, read in blocks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def free_bytes(folder: Path) -> int:
    """Free bytes for this user on the disk of `folder`, which need not exist yet."""
    return shutil.disk_usage(_nearest_existing(folder)).free


def has_free_inodes(folder: Path) -> bool:
    """Whether a few more files can be created, if the file system limits their number."""
    status = os.statvfs(_nearest_existing(folder))
    return status.f_files == 0 or status.f_favail > 4


def error_reason(error: Exception) -> str:
    """The reason of an error as text."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (match := OS_ERROR.search(str(error))):
        number = int(match[1])
    return str(error) if number is None else (FULL | TOO_LARGE).get(number) or os.strerror(number)


@contextmanager
def storage_errors(
    action: str, remedy: str = "", errors: type[Exception] | tuple[type[Exception], ...] = OSError
) -> Iterator[None]:
    """Raise StorageError for such errors inside the block.

    Its message: what failed (`cannot write PATH`), why, and what to do.
    """
    try:
        yield
    except errors as error:
        raise StorageError(f"{action}: {error_reason(error)}{remedy}") from error


def full_disk_error(error: Exception) -> StorageError | None:
    """The error for the user where an OSError means a full disk; None for any other error."""
    if not isinstance(error, OSError) or error.errno not in FULL:
        return None
    where = os.fsdecode(error.filename) if error.filename else f"{os.environ.get('TMPDIR', '/tmp')} or the run folder"
    return StorageError(f"{where}: {FULL[error.errno]}\n  free space there, or set TMPDIR to a folder on another disk")


def format_bytes(num_bytes: float) -> str:
    """A readable size: 512 B, 3.4 MB, 41.2 GB (powers of 1000)."""
    for limit, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= limit:
            return f"{num_bytes / limit:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def _nearest_existing(folder: Path) -> Path:
    """The folder, or its nearest parent that exists."""
    return folder if folder.exists() else _nearest_existing(folder.parent)


def failpoint(name: str) -> None:
    """Inject the fault of RUNNER_FAILPOINT if it names this point."""
    where, _, action = os.environ.get("RUNNER_FAILPOINT", "").partition(":")
    if where != name:
        return
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    code = getattr(errno, action)
    raise OSError(code, os.strerror(code))


MEMORY = Path("/dev/shm")
RENDEZVOUS_FILES = "vllm_dist_*"  # rendezvous files of vLLM's workers
KEPT = ".kept"


def temporary_folder(folder: Path) -> Path:
    """The folder for temporary files of `folder`; short, as a socket's path has at most 107 bytes."""
    name = hashlib.blake2b(os.fsencode(folder.absolute()), digest_size=8).hexdigest()
    return Path(tempfile.gettempdir(), f"run-engine-{name}")


def keep_rendezvous_names(folder: Path) -> None:
    """Record the names of rendezvous files, which vLLM removes; called after its workers are connected."""
    for file in [*folder.glob(RENDEZVOUS_FILES)]:
        file.with_suffix(KEPT).touch()


def remove_temporary_folder(folder: Path, memory: Path = MEMORY) -> None:
    """Remove such a folder, if it exists, and the shared memory that is named after its files."""
    for file in folder.glob(RENDEZVOUS_FILES):
        for shared in memory.glob(f"{glob.escape(file.stem)}*"):
            shared.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
