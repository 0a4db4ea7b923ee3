"""Starts Ray's driver and cleans up after it: Ray's agents outlive a driver that was killed.

python -P -m runner.launch.ray.reaper MODULE ASKED        ASKED: JSON, with the folder of a cluster of its own, or null

link (run) ──pipes──▶ guard ──the same pipes──▶ driver ──▶ a cluster of its own: raylet, agents, actors, their children
                        └─ the driver has ended, however: SIGKILL to all below, the folder removed, its exit code

Whoever of these is killed, the others end: the driver at the end of its stdin, the guard after the driver.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import sys
import time
from contextlib import suppress

from runner.core.subprocess import ChildProcess, descendants, is_cleaner, kill

PR_SET_CHILD_SUBREAPER = 36
TICK_S = 0.1
SETTLE_S = 5.0  # for what clears away after dead processes


def main(module: str, asked: str) -> int:
    """Return the driver's exit code, 128 + n for signal n. SIGUSR1: the driver is killed."""
    ctypes.CDLL(None).prctl(
        PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0
    )  # what the driver leaves behind stays below this process
    folder = json.loads(asked)["folder"]
    forwarded: list[int] = []
    try:
        command = [sys.executable, "-P", "-m", module, asked]
        driver = ChildProcess(command, end_signal=signal.SIGKILL, own_session=False, stdin=None)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            signal.signal(number, lambda *_: None)  # it ends with the driver; not ignored, which children inherit
        signal.signal(signal.SIGUSR1, lambda *_: forwarded.append(signal.SIGKILL))
        code = driver.wait_and_forward(forwarded)
    finally:
        _end_all_below()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
    return code if code >= 0 else 128 - code


def _end_all_below() -> None:
    end = time.monotonic() + SETTLE_S
    while left := descendants(os.getpid()):
        kill([one for one in left if time.monotonic() > end or not is_cleaner(one)])
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(TICK_S)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
