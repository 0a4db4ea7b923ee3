"""Stands beside a job on the machine where it runs, which may be another than the sweep's: runs it, and keeps its note.

python -m runner.sweep.minder [--parent PID] [ORDER.json]      the order on stdin, if no file is named

SIGTERM, SIGINT   passed on to the job, which saves and ends; it is killed after the order's `grace_s`
SIGUSR1           kills the job
its own end       ends the job (see `launch.child`); with --parent, the end of that process is a SIGTERM
exit code         0 once the note tells the job's; else what failed is on stderr
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from types import FrameType

from runner.errors import RunnerError
from runner.launch.child import PR_SET_PDEATHSIG
from runner.sweep.note import TOUCH_S, Note, touch
from runner.sweep.order import Order
from runner.sweep.process import JobProcess

POLL_S = 0.05
KILL = signal.SIGUSR1  # what a minder understands for SIGKILL, which would be its own end


def main() -> int:
    """Run the job that is ordered to its end."""
    parser = argparse.ArgumentParser(prog="minder")
    parser.add_argument("--parent", type=int)
    parser.add_argument("order", nargs="?")
    given = parser.parse_args()
    signals = Signals()
    if given.parent is not None:
        bind(given.parent)
    text = Path(given.order).read_text(encoding="utf-8") if given.order else sys.stdin.read()
    try:
        mind(Order(**json.loads(text)), signals)
    except RunnerError as error:
        print(f"{socket.gethostname()}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


class Signals:
    """The signals that came, to be passed on."""

    def __init__(self) -> None:
        self._received: list[int] = []
        for number in (signal.SIGTERM, signal.SIGINT, KILL):
            signal.signal(number, self._receive)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a worker of Ray may block some, and hand that down

    def take(self) -> list[int]:
        """Those that came since the last call."""
        taken, self._received = self._received, []
        return taken

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received.append(number)


def bind(parent: int) -> None:
    """Make the end of this process's parent a SIGTERM. Raises OSError where the kernel cannot."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM)) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it has ended by now
        os.kill(os.getpid(), signal.SIGTERM)


def mind(order: Order, signals: Signals) -> None:
    """Run a job, and write down how it ended. Raises StorageError where it cannot be started or written down."""
    job = JobProcess(order.command, Path(order.log), order.environment, place=order.place)
    note, path = begun(order), Path(order.note)
    note.write(path)
    code = _follow(job, order, signals)
    note.with_end(time.time(), code).write(path)


def begun(order: Order) -> Note:
    """The note of a job that starts now, in this process's environment."""
    cards = os.environ.get(order.visible, "") if order.visible else ""
    devices = tuple(filter(None, cards.split(",")))
    return Note(order.token, socket.gethostname(), os.getpid(), time.time(), devices)


def _follow(job: JobProcess, order: Order, signals: Signals) -> int:
    touched, deadline = time.monotonic(), float("inf")
    while (code := job.poll()) is None:
        for number in signals.take():
            job.signal(signal.SIGKILL if number == KILL else number)
            deadline = min(deadline, time.monotonic() + order.grace_s)
        if time.monotonic() > deadline:
            job.signal(signal.SIGKILL)
        if time.monotonic() - touched > TOUCH_S:
            touched = time.monotonic()
            touch(Path(order.note))
        time.sleep(POLL_S)
    return code


if __name__ == "__main__":
    sys.exit(main())
