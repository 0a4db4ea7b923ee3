"""One process of a job as its launcher sees it, and how it is ordered from whoever starts it.

Team ──Order──▶ Starter ──Process──▶ Team        on this machine: Local and Member; elsewhere, what speaks for it

A member here is a process in a session of its own, killed by the kernel when the launcher ends.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import psutil

from runner.core.subprocess import ChildProcess
from runner.errors import EnvironmentProblem, StorageError
from runner.folder import RunFolder, shown
from runner.launch.janitor import Janitor
from runner.launch.link import Ear
from runner.launch.verdict import Ended
from runner.place import Place
from runner.shelf_folder import places
from runner.temporary import temporary_of

Role = Literal["rank", "sampler"]
# What a process of each role runs, after the interpreter
PROGRAMS: dict[Role, tuple[str, ...]] = {
    "rank": ("-P", "-m", "runner.launch.rank"),
    "sampler": ("-P", "-m", "runner.launch.sampling"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A process that is to be started, as plain data: it may be carried to another machine.

    index: the rank, or the number among those of its role; place: of a rank; cards: the numbers of its devices among
    those of the job on its machine; environment: all that the launcher adds to what the machine gives; meets: holds
    what ranks meet at
    """

    role: Role
    index: int
    folder: RunFolder
    attempt: int
    cards: tuple[int, ...]
    environment: Mapping[str, str]
    place: Place | None = None
    meets: bool = False

    @property
    def name(self) -> str:
        """rank 2 of 4, sampler 0"""
        return str(self.place) if self.place is not None else f"{self.role} {self.index}"

    @property
    def leads(self) -> bool:
        """Whether it is rank 0, which has the screen."""
        return self.place is not None and self.place.leads

    @property
    def scratch(self) -> tuple[Path, ...]:
        """The folders that it may leave where it is killed."""
        first = self.place is not None and self.place.local_rank == 0  # who has the weights for samplers
        engine = self.folder.engine
        return (engine, temporary_of(engine), *(places(self.folder.root) if first else ()))

    def words(self, pipe: int, listener: int | None) -> list[str]:
        """What follows the interpreter.

        pipe: the descriptor that it speaks to its launcher over; listener: that of the socket of the ranks' store
        """
        last = str(self.index) if self.role != "rank" else "-" if listener is None else str(listener)
        return [*PROGRAMS[self.role], str(self.folder.root), str(self.attempt), str(pipe), last]


class Process(Protocol):
    """A process of the job that was started, wherever it runs."""

    order: Order
    ear: Ear

    def runs(self) -> bool: ...  # once it does not, all that it said was heard, and what it had started is killed

    def signal(self, number: int) -> None: ...  # to itself alone

    def kill(self) -> None: ...  # it, and what it started

    def ended(self) -> Ended: ...  # how; waits for one that was killed just now

    def status(self) -> str: ...  # one of psutil.STATUS_*; empty where it is not known


class Starter(Protocol):
    """Starts the processes of an attempt. Its methods raise StorageError, EnvironmentProblem."""

    def places(self) -> Sequence[Place]: ...  # of the ranks that it is to start

    def meeting(self) -> tuple[str, int]: ...  # host and port of the ranks' store, where somebody listens by now

    def start(self, order: Order) -> Process: ...

    def close(self) -> None: ...  # what it holds itself; the processes have ended


@dataclass(slots=True)
class Member:
    """A process on this machine. `killed`: by this launcher, because the job ends or the process does not answer."""

    order: Order
    process: ChildProcess
    ear: Ear
    janitor: Janitor | None = None  # ends what the process has started where the launcher is killed
    killed: bool = False

    def __post_init__(self) -> None:
        if self.janitor is not None:
            self.janitor.watch(self.process.pid)

    @classmethod
    def start(
        cls,
        order: Order,
        environment: Mapping[str, str],
        listener: int | None = None,
        janitor: Janitor | None = None,
        screen: tuple[int | None, int | None] = (None, None),
    ) -> Member:
        """Start it. Rank 0 has the screen, the others write to their logs.

        environment: all of it; listener: the socket of the ranks' store; screen: what rank 0 has for stdout and stderr,
        by descriptor (None: this process's). Raises StorageError, EnvironmentProblem.
        """
        log_path = order.folder.log
        hearing, telling = os.pipe()
        handles = [telling, *([] if listener is None else [listener])]
        try:
            with log_path.open("ab") as log:
                stdout, stderr = screen if order.leads else (log, log)
                process = ChildProcess(
                    [sys.executable, *order.words(telling, listener)],
                    end_signal=signal.SIGKILL,
                    stdout=stdout,
                    stderr=stderr,
                    env=environment,
                    pass_fds=handles,
                )
        except PermissionError as error:
            os.close(hearing)
            raise StorageError(f"cannot write {log_path}: {error.strerror}") from error
        except OSError as error:
            os.close(hearing)
            raise EnvironmentProblem(f"cannot start {order.name}: {error}") from error
        finally:
            os.close(telling)
        return cls(order, process, Ear(hearing), janitor)

    def runs(self) -> bool:
        """Whether it still does. Once it does not, what it has started is killed, and all it said was heard."""
        if self.process.runs():
            return True
        if self.ear.open:
            if self.janitor is not None:
                self.janitor.forget(self.process.pid)
            self.ear.listen()
            self.ear.close()
        return False

    def signal(self, number: int) -> None:
        """Send the process, and nothing that it started, a signal."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """End it and what it started."""
        if self.runs():
            self.killed = True
            self.process.kill()

    def ended(self) -> Ended:
        """How it ended; waits for the end of one that was killed."""
        while self.runs():
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        log = shown(self.order.folder.log)
        return Ended(self.order.name, self.process.returncode, self.ear.report, log, self.killed)

    def status(self) -> str:
        """What the process does, one of psutil.STATUS_*; empty where it is gone."""
        try:
            return psutil.Process(self.process.pid).status()
        except psutil.NoSuchProcess:
            return ""
