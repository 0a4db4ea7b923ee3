"""A lock among processes of several machines: the kernel's, or else a file with a heartbeat.

    FileLock.acquire ─▶ flock(PATH) ──┬─ locked: the kernel releases it when the process ends
                                      └─ this file system has no locks ─▶ PATH.heartbeat, touched every BEAT_S seconds

A heartbeat that is older than STALE_S seconds belongs to a process that has ended. So does one of a process of this
machine that is not there.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import socket
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from threading import Event, Thread
from typing import Self

from runner.core.subprocess import process_identity

log = logging.getLogger("runner")
# of flock: where a disk, or a folder on it, has no locks (NFS locks only what can be written)
UNLOCKABLE = (errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
BEAT_S, STALE_S, POLL_S = 10.0, 60.0, 1.0
_said: set[str] = set()  # folders of which it was said that they have no locks


class FileLock:
    """A lock on a path. `with` releases it; it holds until then, or until the process ends."""

    def __init__(self, path: Path) -> None:
        """Open the file of the lock. Raises OSError."""
        self._path, self._beat = path, _heartbeat_of(path)
        self.handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._stop: Event | None = None

    def acquire(self, *, wait: bool = False) -> Self:
        """Take the lock. Raises BlockingIOError where another process has it and wait is False; OSError."""
        try:
            fcntl.flock(self.handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            if error.errno not in UNLOCKABLE:
                raise
            self._say(error)
            while not self._take_heartbeat():
                if not wait:
                    raise BlockingIOError(errno.EAGAIN, "another process has it", str(self._path)) from None
                time.sleep(POLL_S)
            self._stop = Event()
            Thread(target=self._keep_alive, args=(self._stop,), daemon=True).start()
        return self

    def owner(self) -> str:
        """The process that has written its number into the file."""
        return os.pread(self.handle, 64, 0).decode(errors="replace") or "unknown"

    def sign(self) -> None:
        """Write this process's number into the file. Raises OSError."""
        os.ftruncate(self.handle, 0)
        os.pwrite(self.handle, str(os.getpid()).encode(), 0)

    def release(self) -> None:
        """Release the lock, if it was taken, and close the file."""
        if self._stop is not None:
            self._stop.set()
            self._stop = None
            self._beat.unlink(missing_ok=True)
        os.close(self.handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _take_heartbeat(self) -> bool:
        """Create the file with the heartbeat; False if that of a living process is there."""
        if self._beat.exists() and is_stale(self._beat):
            aside = self._beat.with_name(f"{self._beat.name}.{secrets.token_hex(4)}")
            with suppress(FileNotFoundError):  # another process was faster
                self._beat.rename(aside)
                if not is_stale(aside):  # and has taken the lock meanwhile
                    aside.rename(self._beat)
                aside.unlink(missing_ok=True)
        try:
            with self._beat.open("x") as file:
                file.write(f"{_machine()} {process_identity(os.getpid())}")
        except FileExistsError:
            return False
        return True

    def _keep_alive(self, stop: Event) -> None:
        while not stop.wait(BEAT_S):
            try:
                os.utime(self._beat)
            except OSError as error:
                log.warning("the heartbeat %s cannot be written: %s", self._beat, error.strerror)

    def _say(self, error: OSError) -> None:
        if (folder := str(self._path.parent)) not in _said:
            _said.add(folder)
            log.warning(
                "%s: this file system has no locks (%s); a file with a heartbeat is used: after a process was killed, "
                "wait %d s",
                folder, error.strerror, STALE_S,
            )  # fmt: skip


def is_locked(path: Path) -> bool:
    """Whether a process has a lock on a path; False where the file is not there. Raises OSError."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        # a shared lock, so that concurrent checks do not see each other as owners
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        if error.errno not in UNLOCKABLE:
            raise
        return _heartbeat_of(path).exists() and not is_stale(_heartbeat_of(path))
    finally:
        os.close(handle)
    return False


def is_stale(beat: Path) -> bool:
    """Whether the process that wrote a heartbeat has ended, or the file is gone."""
    try:
        machine, _, process = beat.read_text().partition(" ")
        age = _clock(beat.parent) - beat.stat().st_mtime
    except FileNotFoundError:
        return True
    if process and machine == _machine():
        return process != str(process_identity(int(process.strip("()").partition(",")[0])))
    return age > STALE_S


def _heartbeat_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.heartbeat")


def _machine() -> str:
    """Names this machine, since it was started, and the container's view of its processes."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()}:{boot}:{os.readlink('/proc/self/ns/pid')}"


def _clock(folder: Path) -> float:
    """The time of a folder's disk, which may be another machine's; else that of this machine."""
    probe = folder / f".clock-{secrets.token_hex(4)}"
    try:
        probe.touch(exist_ok=False)
        return probe.stat().st_mtime
    except OSError:
        return datetime.now().timestamp()
    finally:
        with suppress(OSError):
            probe.unlink()
