"""The folder of a run's weights for its samplers: in the host's memory, and removed with the run.

    /dev/shm/posttrain-run-<hash of the run folder's path>     where there is room
    <run folder>/weights/<host>                                  where there is not

The process that writes there holds the folder's lock, which the kernel frees however that process ends. A folder
without a lock belongs to a dead run, and the next run removes it. Nothing here imports torch.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from runner.core import fsync_io
from runner.core.errors import EnvironmentProblem, StorageError
from runner.core.file_lock import UNLOCKABLE

log = logging.getLogger("runner")

MEMORY = Path("/dev/shm")
PREFIX = "posttrain-run-"
BESIDE = "weights"  # in the run's folder
RUN = "RUN"  # a file that says whose weights these are


@dataclass(frozen=True, slots=True)
class ReservedDir:
    """A folder that is this process's alone; `handle` holds its lock."""

    folder: Path
    handle: int

    def release(self) -> None:
        """Remove the folder, then give up the lock. Once."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self.handle)


def store_dirs(root: Path, memory: Path = MEMORY) -> tuple[Path, ...]:
    """Every place where weights of the run in `root` may lie on this machine, in this order."""
    name = hashlib.blake2b(os.fsencode(root.absolute()), digest_size=8).hexdigest()
    return memory / f"{PREFIX}{name}", root.absolute() / BESIDE


def reserve_dir(root: Path, need: int, memory: Path = MEMORY) -> ReservedDir:
    """A new, empty folder in `root` for weights of up to `need` bytes, readable for this user only.

    What dead runs left in the host's memory is removed first. Both that and that there is no room there are said.
    Raises EnvironmentProblem where another process has the run's folder, StorageError where there can be none.
    """
    fast, beside = store_dirs(root, memory)
    remove_stale_dirs(memory)
    free = fsync_io.free_bytes(memory) if memory.is_dir() else 0
    if free >= need and (made := _make_locked_dir(fast, root)) is not None:
        return made
    why = (
        f"{fsync_io.format_bytes(free)} free, {fsync_io.format_bytes(need)} needed"
        if free < need
        else "it belongs to another user"
    )
    log.warning("weights for samplers are stored in %s, on disk: not enough space in %s (%s)", beside, memory, why)
    _remove_stale(beside / socket.gethostname())
    made = _make_locked_dir(beside / socket.gethostname(), root)
    assert made is not None  # below the run's folder everything is the user's
    return made


def remove_stale_dirs(memory: Path = MEMORY) -> None:
    """Remove what dead runs of this user have left in the host's memory, and say so."""
    for path in memory.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another process was faster, or it is another user's
            if path.is_dir() and not path.is_symlink() and path.stat().st_uid == os.getuid():
                _remove_stale(path)


def _remove_stale(path: Path) -> None:
    """Remove a folder that no process locks; nothing happens where there is none."""
    with suppress(FileNotFoundError):
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            _lock(handle)
            size = sum(file.stat().st_size for file in path.iterdir())
            whose = path / RUN
            run = whose.read_text(encoding="utf-8", errors="replace") if whose.exists() else "unknown"
            shutil.rmtree(path)
            log.warning(
                "removed weights that a dead run left in %s (%s, of %s)", path, fsync_io.format_bytes(size), run
            )
        except BlockingIOError:
            pass  # the run is alive
        finally:
            os.close(handle)


def _make_locked_dir(path: Path, root: Path) -> ReservedDir | None:
    """The folder, made and locked; None where it is another user's."""
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                path.mkdir(mode=0o700)
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                return None
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # removed in between, as stale
            continue
        except OSError as error:
            raise StorageError(f"cannot create {path} for the samplers' weights: {error.strerror}") from error
        try:
            _lock(handle)
        except BlockingIOError:
            os.close(handle)
            text = f"{path}: another process publishes weights of this run; wait until it ends, or stop it"
            raise EnvironmentProblem(text) from None
        if _is(path, handle):
            (path / RUN).write_bytes(os.fsencode(root.absolute()))
            return ReservedDir(path, handle)
        os.close(handle)


def _lock(handle: int) -> None:
    """Raise BlockingIOError where another process has the folder.

    Where a disk knows no locks of folders nothing is locked: that can only be the run's own disk, and the run's folder
    has a lock.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in UNLOCKABLE:
            raise


def _is(path: Path, handle: int) -> bool:
    """Whether what was opened still has this path."""
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False
