"""Stands beside a job on the machine where it runs, which may be another than the sweep's: runs it, and keeps its note.

python -m runner.sweep.minder [--parent PID] [ORDER.json]      the order on stdin, if no file is named

SIGTERM, SIGINT   the first is passed on to the job, which saves and ends; it is killed after the order's `grace_s`
SIGUSR1           kills the job
its own end       ends the job (see `core.subprocess`); with --parent, the end of that process is a SIGTERM
exit code         0 once the note tells the job's; else what failed is on stderr

A job in Slurm has `runner.sweep.slurm.job` beside it instead, which is told other things and minds it in the same way.
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
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType

from runner.core.subprocess import PR_SET_PDEATHSIG
from runner.errors import RunnerError
from runner.sweep.note import TOUCH_S, Note, now, touch
from runner.sweep.order import Order
from runner.sweep.outcome import Told
from runner.sweep.process import JobProcess

POLL_S = 0.05
# What the job gets for what this process is told. A SIGKILL would be its own end: SIGUSR1 stands for it.
PASSED_ON: Mapping[int, int] = {
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGINT: signal.SIGINT,
    signal.SIGUSR1: signal.SIGKILL,
}


def main() -> int:
    """Run the job that is ordered to its end."""
    parser = argparse.ArgumentParser(prog="minder")
    parser.add_argument("--parent", type=int)
    parser.add_argument("order", nargs="?")
    given = parser.parse_args()
    signals = Signals(PASSED_ON)
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
    """The signals that came, in their order."""

    def __init__(self, numbers: Iterable[int]) -> None:
        self._received: list[int] = []
        for number in numbers:
            signal.signal(number, self._receive)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # who started this may block some, and hand that down

    def take(self) -> list[int]:
        """Those that came since the last call."""
        taken, self._received = self._received, []
        return taken

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received.append(number)


class Minder:
    """A job's process, and what it is told. `first`: the first signal that came; `told`: of a time limit, if it was."""

    def __init__(
        self,
        order: Order,
        command: Sequence[str],
        passed_on: Mapping[int, int],
        signals: Signals,
        environment: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Starts it. Raises StorageError where it cannot.

        passed_on: signal → what the job gets for it; 0: it has got it already
        """
        self._order, self._passed_on, self._signals, self._timeout_s = order, passed_on, signals, timeout_s
        variables = {**order.environment, **(environment or {})}
        self._process = JobProcess(command, Path(order.log), variables, place=order.place)
        self._began = self._touched = time.monotonic()
        self._deadline = float("inf")
        self.first: int | None = None
        self.told: Told | None = None

    def run(self) -> int:
        """The exit code (negative: the signal that killed it), once it has ended."""
        while (code := self._process.poll()) is None:
            for number in self._signals.take():
                self.first = self.first or number
                self._pass_on(self._passed_on[number])
            self._keep_time()
            time.sleep(POLL_S)
        return code

    def _pass_on(self, number: int) -> None:
        """Tell the job once, whatever comes how often: a second signal would end it unsaved."""
        if number == signal.SIGKILL:
            self._process.signal(number)
        elif self._deadline == float("inf"):
            self._deadline = time.monotonic() + self._order.grace_s
            if number:
                self._process.signal(number)

    def _keep_time(self) -> None:
        moment, limit = time.monotonic(), self._timeout_s
        if limit is not None and moment - self._began > limit and self._deadline == float("inf"):
            self.told = Told(f"not done after {limit:g} s (sweep.timeout_s)", "timeout")
            self._pass_on(signal.SIGTERM)
        if moment > self._deadline:
            self._process.signal(signal.SIGKILL)
        if moment - self._touched > TOUCH_S:
            self._touched = moment
            touch(Path(self._order.note))


def bind(parent: int) -> None:
    """Make the end of this process's parent a SIGTERM. Raises OSError where the kernel cannot."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM)) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it has ended by now
        os.kill(os.getpid(), signal.SIGTERM)


def mind(order: Order, signals: Signals) -> None:
    """Run a job, and write down how it ended. Raises StorageError where it cannot be started or written down."""
    minder = Minder(order, order.command, PASSED_ON, signals)
    cards = os.environ.get(order.visible, "") if order.visible else ""
    note, path = begun(order, tuple(filter(None, cards.split(",")))), Path(order.note)
    note.write(path)
    code = minder.run()
    note.with_end(now(), code).write(path)


def begun(order: Order, devices: tuple[str, ...]) -> Note:
    """The note of a job that starts now, beside this process."""
    return Note(order.token, socket.gethostname(), os.getpid(), now(), devices)


if __name__ == "__main__":
    sys.exit(main())
