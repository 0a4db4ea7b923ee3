"""Saves to a tiny file system of its own, under each kind of shortage; run by test_disk.py in a mount namespace.

argument: a folder to mount on.   prints one JSON line per case: {"case", "error", "message", "left", "newest"}
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from runner.checkpoint.config import SafetensorsConfig
from runner.checkpoint.store import CheckpointStore
from runner.core import fsync_io
from runner.core.errors import RunnerError

MIB = 2**20


def save(root: Path, step: int, num_bytes: int, *, background: bool = False) -> None:
    store = CheckpointStore(SafetensorsConfig(keep=1), root=root, report=lambda words: None)
    state = {"policy": {"tensors": {"w": torch.full((num_bytes // 4,), float(step))}}}
    if not background:
        store.save(step, state, {})
        return
    store.start(step, state, {})
    while True:  # steps, after each of which it is asked; ended by the error
        store.check()


def mount(disk: Path) -> None:
    options = "size=4m,nr_inodes=20"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)], check=True)


def bytes_short(disk: Path, root: Path) -> None:
    save(root, 2, 2 * MIB)


def bytes_short_in_the_background(disk: Path, root: Path) -> None:
    save(root, 2, 2 * MIB, background=True)


def filled_meanwhile(disk: Path, root: Path) -> None:
    fsync_io.free_bytes, counted = (
        lambda folder: 2**40,
        fsync_io.free_bytes,
    )  # as if another writer filled it
    try:
        save(root, 2, 6 * MIB, background=True)
    finally:
        fsync_io.free_bytes = counted


def inodes_short(disk: Path, root: Path) -> None:
    taken = 0
    try:
        while True:
            (disk / f"fill{taken}").touch()
            taken += 1
    except OSError:
        for i in range(2):  # room for the staging folder and state.json; not for the tensors
            (disk / f"fill{i}").unlink()
    save(root, 2, MIB // 4)


def file_size_limit(disk: Path, root: Path) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB // 2, before[1]))
    try:
        save(root, 2, MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def read_only(disk: Path, root: Path) -> None:
    subprocess.run(["mount", "-o", "remount,bind,ro", str(disk)], check=True)
    save(root, 2, MIB // 4)


def run(case: Callable[[Path, Path], None], disk: Path) -> None:
    mount(disk)
    root = disk / "checkpoints"
    save(root, 1, MIB // 4)
    error, message = "none", ""
    try:
        case(disk, root)
    except RunnerError as problem:
        error, message = type(problem).__name__, str(problem)
    loaded = CheckpointStore(SafetensorsConfig(), root=root, report=lambda words: None).load()
    left = sorted(p.name for p in root.iterdir())
    result = {"case": case.__name__, "error": error, "message": message, "left": left}
    print(json.dumps(result | {"newest": loaded.step if loaded else None}), flush=True)
    subprocess.run(["umount", "-l", str(disk)], check=True)


if __name__ == "__main__":
    for each in (
        bytes_short,
        bytes_short_in_the_background,
        filled_meanwhile,
        inodes_short,
        file_size_limit,
        read_only,
    ):
        run(each, Path(sys.argv[1]))
