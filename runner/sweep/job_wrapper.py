"""Starts a job on its machine, forwards signals, and writes the job's status file.

python -m runner.sweep.job_wrapper [PARENT]      the attempt as JSON on stdin

SIGTERM, SIGINT   the first one is forwarded to the job, which saves and ends; after `grace_s` it is killed
SIGUSR1           kills the job
its own end       ends the job (see `core.subprocess`); the end of the process PARENT counts as SIGTERM
exit code         0 if the status file has the job's exit code; otherwise the error is on stderr

In Slurm, `slurm_executor_job` does the same, with other signals.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from runner.core.errors import RunnerError, StorageError
from runner.core.subprocess import ChildProcess, end_with_parent, process_identity, with_pdeathsig
from runner.sweep.job import TOUCH_S, JobAttempt, JobStatus, StopReason, from_json, now

POLL_S = 0.05
# Signal to this process → signal to the job. A SIGKILL would end this process: SIGUSR1 stands for it.
FORWARDED: Mapping[int, int] = {
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGINT: signal.SIGINT,
    signal.SIGUSR1: signal.SIGKILL,
}


class JobProcess(ChildProcess):
    """A job's process in its own session; signals go to the whole session, which ends with this process."""

    def __init__(self, attempt: JobAttempt, environment: Mapping[str, str], cores: Sequence[str] = ()) -> None:
        """Start the attempt's command and append its output to its log.

        cores: the cores that it may use; empty = all. Raises StorageError if it cannot be started.
        """
        variables = {**os.environ, **attempt.environment, **environment}
        try:
            with Path(attempt.log).open("ab") as log:
                command = with_pdeathsig(attempt.command, cores)
                super().__init__(command, stdout=log, stderr=subprocess.STDOUT, env=variables, cwd=attempt.place)
        except OSError as error:
            raise StorageError(f"cannot start a job: {error}") from error
        found = process_identity(self.pid)  # None: it has ended
        self.identity: Mapping[str, int] = {"pid": found[0], "started": found[1]} if found else {}

    def poll(self) -> int | None:
        """The exit code (negative: a signal), None while it runs. After its end its children are killed."""
        return None if self.is_running() else self.returncode

    def signal(self, number: int) -> None:
        """Send a signal to the job and its children."""
        if self.is_running():
            with suppress(ProcessLookupError, PermissionError):  # no process is left in it
                os.killpg(self.pid, number)


class SignalQueue(list[int]):
    """Received signals that are not forwarded yet, in their order."""

    def __init__(self, numbers: Iterable[int]) -> None:
        super().__init__()
        for number in numbers:
            signal.signal(number, lambda number, frame: self.append(number))
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the parent may block signals, which children inherit


class JobWrapper:
    """A job's process and its signals.

    first: the first signal; reason: a time limit, if one ended the job
    """

    def __init__(
        self, attempt: JobAttempt, forwarded: Mapping[int, int], signals: SignalQueue, environment: Mapping[str, str]
    ) -> None:
        """Start the job. Raises StorageError if it cannot be started.

        forwarded: signal → the signal that the job gets; 0 = the job received it already
        """
        self._attempt, self._forwarded, self._signals = attempt, forwarded, signals
        self._process = JobProcess(attempt, environment)
        self._began = self._touched = time.monotonic()
        self._deadline = float("inf")
        self.first: int | None = None
        self.reason: StopReason | None = None

    def run(self) -> int:
        """Wait for the job's end; returns its exit code (negative: the signal that killed it)."""
        while (code := self._process.poll()) is None:
            while self._signals:
                number = self._signals.pop(0)
                self.first = self.first or number
                self._forward(self._forwarded[number])
            self._check_clock()
            time.sleep(POLL_S)
        return code

    def _forward(self, number: int) -> None:
        """Send the job one stop signal: a second one would end it before it has saved."""
        if number == signal.SIGKILL:
            self._process.signal(number)
        elif self._deadline == float("inf"):
            self._deadline = time.monotonic() + self._attempt.grace_s
            if number:
                self._process.signal(number)

    def _check_clock(self) -> None:
        moment, limit = time.monotonic(), self._attempt.timeout_s
        if limit is not None and moment - self._began > limit and self._deadline == float("inf"):
            self.reason = StopReason(f"not finished after {limit:g} s (sweep.timeout_s)", "timeout")
            self._forward(signal.SIGTERM)
        if moment > self._deadline:
            self._process.signal(signal.SIGKILL)
        if moment - self._touched > TOUCH_S:
            self._touched = moment
            with suppress(OSError):  # a missing heartbeat must not end the job
                os.utime(self._attempt.note)


def bind_to_parent(parent: int) -> None:
    """Let the kernel send SIGTERM when the parent ends. Raises OSError if it cannot."""
    end_with_parent(signal.SIGTERM)
    if os.getppid() != parent:  # it has ended by now
        os.kill(os.getpid(), signal.SIGTERM)


def begin_status(attempt: JobAttempt, devices: Iterable[str]) -> JobStatus:
    """Write the status of a job that starts now. Raises StorageError."""
    status = JobStatus(attempt.token, socket.gethostname(), os.getpid(), now(), tuple(devices))
    status.write(Path(attempt.note))
    return status


def main() -> int:
    """Run an attempt to its end and write its status."""
    signals = SignalQueue(FORWARDED)
    for parent in sys.argv[1:]:
        bind_to_parent(int(parent))
    attempt = from_json(JobAttempt, json.load(sys.stdin))
    try:
        wrapper = JobWrapper(attempt, FORWARDED, signals, {})
        cards = os.environ.get(attempt.visible, "") if attempt.visible else ""
        status = begin_status(attempt, filter(None, cards.split(",")))
        status.write_end(Path(attempt.note), wrapper.run(), wrapper.reason)
    except RunnerError as error:
        print(f"{socket.gethostname()}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
