"""Files in the cache of tokenized data: locks, errors, and checksums that are computed once.

NAME            a folder of columns, or a note on a data file: what the file system said of it, and its sha256
.NAME.lock      held while it is made or checked
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from threading import Timer

from runner.core.file_lock import FileLock
from runner.core.fsync_io import atomic_write, sha256, storage_errors

log = logging.getLogger("runner")
WAIT_S = 5.0  # a wait that is longer is said
NOTED_BYTES = 2**24  # a smaller file is read in less time than a note saves
SETTLED_S = 2.0  # a file that was changed later than this may change again within the clock of its file system


def lock_path(path: Path) -> Path:
    """The file that is locked while a path of the cache is made or checked."""
    return path.with_name(f".{path.name}.lock")


@contextmanager
def cache_lock(path: Path) -> Iterator[None]:
    """Lock a path of the cache, which the ranks of a job need at the same time.

    Raises StorageError where the cache cannot be written.
    """
    remedy = "; free space, set the variable RUNNER_CACHE to another folder, or set data.cache=false"
    with storage_errors(f"cannot write the token cache {path}", remedy):
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(lock_path(path)) as lock:
            try:
                lock.acquire()
            except BlockingIOError:
                waits = Timer(WAIT_S, log.info, ("waiting for another process, which writes %s", path))
                waits.start()
                try:
                    lock.acquire(wait=True)
                finally:
                    waits.cancel()
            yield


def file_state(path: Path) -> list[int]:
    """What the file system says of a file, which changes when it is written, copied or put back."""
    found = path.stat()
    return [found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def file_digest(path: Path, notes: Path | None) -> str:
    """The hex sha256 of a file, from its note in the folder `notes` where the file is as it was then.

    Raises OSError and StorageError.
    """
    if notes is None or path.stat().st_size < NOTED_BYTES:
        return sha256(path)
    note = notes / hashlib.blake2b(os.fsencode(path.absolute()), digest_size=16).hexdigest()
    with cache_lock(note):
        state, begin = " ".join(map(str, file_state(path))), datetime.now().timestamp()
        known, _, digest = note.read_text().rpartition(" ") if note.exists() else ("", "", "")
        if known != state:
            digest = sha256(path)
            if begin - path.stat().st_ctime > SETTLED_S:
                atomic_write(note, f"{state} {digest}".encode())
        return digest
