"""One job's process: started in a session of its own, signalled as a group, and never outlived by what it started."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from runner.core import subprocess as processes
from runner.core.subprocess import with_pdeathsig
from runner.errors import StorageError


class JobProcess:
    """A running job. Its output goes to the end of `log`; it ends with this process (see `core.subprocess`)."""

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        cores: Sequence[str] = (),
        place: str | None = None,
    ) -> None:
        """Raises StorageError where it cannot be started; `place` is its working folder, by default this one."""
        try:
            with log.open("ab") as output:
                self._process = subprocess.Popen(
                    with_pdeathsig(command, cores),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **environment},
                    cwd=place,
                    start_new_session=True,  # Ctrl-C is for the sweep, which then tells the job
                )
        except OSError as error:
            raise StorageError(f"cannot start a job: {error}") from error
        self.identity = processes.identify(self._process.pid)

    def poll(self) -> int | None:
        """The exit code (negative: the signal that killed it), None while it runs. What it left behind is killed."""
        if self._process.returncode is None:
            pid = self._process.pid
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return None
            self._signal_group(signal.SIGKILL)  # before it is reaped: until then nobody else can have its number
        return self._process.poll()

    def signal(self, number: int) -> None:
        """Tell the job and what it started."""
        if self.poll() is None:
            self._signal_group(number)

    def _signal_group(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):  # nobody is left in it
            os.killpg(self._process.pid, number)


def is_alive(identity: processes.Identity) -> bool:
    """Whether the process with this number and start time still runs."""
    return processes.identify(identity[0]) == tuple(identity)


def end_orphan(identity: processes.Identity, number: int) -> bool:
    """Signal the group of a job that outlived its sweep; False when it is gone."""
    if not is_alive(identity):
        return False
    with suppress(ProcessLookupError):
        os.killpg(identity[0], number)
    return True
