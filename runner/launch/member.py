"""One rank as its launcher sees it: a process in a session of its own, killed by the kernel when the launcher ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from runner.errors import EnvironmentProblem, StorageError
from runner.folder import RunFolder, shown
from runner.launch.child import bound
from runner.launch.link import Ear
from runner.launch.verdict import Ended
from runner.place import Place

PROGRAM = ("-P", "-m", "runner.launch.rank")  # what a rank runs, after the interpreter


@dataclass(slots=True)
class Member:
    """A rank that was started. `killed`: by this launcher, because the job ends."""

    place: Place
    folder: RunFolder
    process: subprocess.Popen[bytes]
    ear: Ear
    killed: bool = False

    @classmethod
    def start(
        cls, place: Place, folder: RunFolder, attempt: int, environment: Mapping[str, str], listener: int | None
    ) -> Member:
        """Start it. Rank 0 has this process's screen, the others write to their logs.

        listener: the socket of the job's store, for rank 0. Raises StorageError, EnvironmentProblem.
        """
        own = folder.of_rank(place.rank)
        hearing, telling = os.pipe()
        handles = [telling, *([] if listener is None else [listener])]
        words = [str(own.root), str(attempt), str(telling), "-" if listener is None else str(listener)]
        command = [sys.executable, *PROGRAM, *words]
        try:
            with own.log.open("ab") as log:
                output = None if place.leads else log
                process = subprocess.Popen(
                    bound(command, ending=signal.SIGKILL),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env={**os.environ, **environment, **place.variables()},
                    pass_fds=handles,
                    start_new_session=True,  # Ctrl-C is for the launcher, which then tells all ranks once
                )
        except PermissionError as error:
            raise StorageError(f"cannot write {own.log}: {error.strerror}") from error
        except OSError as error:
            raise EnvironmentProblem(f"cannot start {place}: {error}") from error
        finally:
            os.close(telling)
        return cls(place, own, process, Ear(hearing))

    @property
    def name(self) -> str:
        """rank 2 of 4"""
        return str(self.place)

    def runs(self) -> bool:
        """Whether it still does. Once it does not, what it has started is killed, and all it said was heard."""
        if self.process.returncode is not None:
            return False
        if os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return True
        self._signal_group(signal.SIGKILL)  # before it is reaped: until then nobody else can have its number
        self.process.wait()
        self.ear.listen()
        self.ear.close()
        return False

    def signal(self, number: int) -> None:
        """Send the rank, and nothing that it started, a signal."""
        if self.process.returncode is None:
            self.process.send_signal(number)

    def kill(self) -> None:
        """End it and what it started."""
        if self.runs():
            self.killed = True
            self._signal_group(signal.SIGKILL)

    def ended(self) -> Ended:
        """How it ended."""
        assert self.process.returncode is not None
        return Ended(self.name, self.process.returncode, self.ear.report, shown(self.folder.log), self.killed)

    def _signal_group(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):  # nobody is left in it
            os.killpg(self.process.pid, number)
