"""A folder for the temporary files of a process that would not remove them itself, at a path that others can tell.

    <temporary files>/run-engine-<hash of the folder's path>    files by which workers meet, sockets

vLLM leaves them there where it is killed, and some wherever it ends. On the processor its workers share memory as well,
under the names of those files, which outlasts them. Nothing here imports torch.
"""

from __future__ import annotations

import glob
import hashlib
import os
import shutil
import tempfile
from pathlib import Path

MEMORY = Path("/dev/shm")
MEETINGS = "vllm_dist_*"  # vLLM's files by which its workers meet
KEPT = ".kept"


def temporary_of(folder: Path) -> Path:
    """The folder for temporary files that goes with `folder`. Short, as a socket's path has at most 107 bytes."""
    name = hashlib.blake2b(os.fsencode(folder.absolute()), digest_size=8).hexdigest()
    return Path(tempfile.gettempdir(), f"run-engine-{name}")


def keep_names(folder: Path) -> None:
    """Once workers have met: how the files by which they met are called is known even when these are gone."""
    for file in [*folder.glob(MEETINGS)]:
        file.with_suffix(KEPT).touch()


def remove(folder: Path, memory: Path = MEMORY) -> None:
    """Remove such a folder, where there is one, and the memory that is called after files in it."""
    for file in folder.glob(MEETINGS):
        for shared in memory.glob(f"{glob.escape(file.stem)}*"):
            shared.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
