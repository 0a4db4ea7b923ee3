"""One process of a job as its supervisor sees it: its start, its state, its status file.

Supervisor ──WorkerSpec──▶ WorkerLauncher ──▶ WorkerProcess        on this machine: LocalWorker
                                                ├─▶ WorkerStatusFile ─▶ members/<machine>.json, for `run status`
                                                └─▶ dump_stacks: where each thread is, of a hanging process

A LocalWorker is a process in its own session, which the kernel kills when the supervisor ends. No step waits for the
status file, and a write error does not end a job: readers then see an old file.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Protocol

import psutil

from runner.core.errors import EnvironmentProblem, StorageError
from runner.core.rank_info import Host, RankInfo
from runner.core.subprocess import ChildProcess
from runner.launch.cleanup_process import CleanupProcess, scratch_folders
from runner.launch.exit_cause import ProcessExit
from runner.launch.heartbeat import HeartbeatReader
from runner.run_dir.folder import RunFolder, display_path

Role = Literal["rank", "sampler"]
# The program of each role: arguments of the interpreter
PROGRAMS: dict[Role, tuple[str, ...]] = {
    "rank": ("-P", "-m", "runner.launch.rank_main"),
    "sampler": ("-P", "-m", "runner.launch.sampler_main"),
}
BEAT_S = 2.0
STACKS = signal.SIGUSR2  # requests a stack dump; SIGUSR1 requests a checkpoint
DUMP_S = 1.0  # for processes to write their stacks
HEAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*most recent call first.*:$", re.MULTILINE)
FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$', re.MULTILINE)
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")} | {"<frozen"})
STOPPED = {
    psutil.STATUS_STOPPED: "stopped (SIGSTOP)",
    psutil.STATUS_TRACING_STOP: "stopped by a debugger",
    psutil.STATUS_DISK_SLEEP: "waiting in the kernel for a disk or a device",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """A process to start, as plain data that can be sent to another machine.

    index: the rank, or the sampler's number; place: of a rank; cards: the numbers of its devices among those of the job
    on its machine; environment: variables that the launcher adds to those of the machine; hosts_store: whether it
    serves the ranks' rendezvous store
    """

    role: Role
    index: int
    folder: RunFolder
    attempt: int
    cards: tuple[int, ...]
    environment: Mapping[str, str]
    place: RankInfo | None = None
    hosts_store: bool = False

    @property
    def name(self) -> str:
        """rank 2 of 4, sampler 0"""
        return str(self.place) if self.place is not None else f"{self.role} {self.index}"

    @property
    def is_rank0(self) -> bool:
        """Whether it is rank 0, which has the screen."""
        return self.place is not None and self.place.is_rank0

    @property
    def scratch(self) -> tuple[Path, ...]:
        """Folders that remain if it is killed."""
        return scratch_folders(self.folder, self.place)

    def command_line(self, pipe: int, listener: int | None) -> list[str]:
        """The arguments of the interpreter.

        pipe: the descriptor for messages to its launcher; listener: that of the socket of the ranks' store
        """
        last = str(self.index) if self.role != "rank" else "-" if listener is None else str(listener)
        return [*PROGRAMS[self.role], str(self.folder.root), str(self.attempt), str(pipe), last]


class WorkerProcess(Protocol):
    """A started process of the job, on any machine."""

    spec: WorkerSpec
    heartbeat: HeartbeatReader

    def is_running(self) -> bool: ...  # once False, its output was read and its children are killed

    def signal(self, number: int) -> None: ...  # not to its children

    def kill(self) -> None: ...  # and its children

    def wait_for_exit(self) -> ProcessExit: ...  # waits for a process that was just killed

    def status(self) -> str: ...  # one of psutil.STATUS_*; empty if unknown


class WorkerLauncher(Protocol):
    """Starts the processes of an attempt. Its methods raise StorageError, EnvironmentProblem."""

    def local_ranks(self) -> Sequence[RankInfo]: ...  # the ranks that it starts

    def rendezvous_address(self) -> tuple[str, int]: ...  # where the ranks' store already listens

    def start(self, worker: WorkerSpec) -> WorkerProcess: ...


@dataclass(slots=True)
class LocalWorker:
    """A process on this machine. `killed`: by this supervisor, because the job ends or it hangs."""

    spec: WorkerSpec
    process: ChildProcess
    heartbeat: HeartbeatReader
    cleanup: CleanupProcess | None = None  # kills the children if the launcher is killed
    killed: bool = False

    def __post_init__(self) -> None:
        if self.cleanup is not None:
            self.cleanup.watch(self.process.pid)

    @classmethod
    def start(
        cls,
        spec: WorkerSpec,
        environment: Mapping[str, str],
        listener: int | None = None,
        cleanup: CleanupProcess | None = None,
        screen: tuple[int | None, int | None] = (None, None),
    ) -> LocalWorker:
        """Start it. Rank 0 has the screen, the others write to their logs.

        environment: all of it; listener: the socket of the ranks' store; screen: what rank 0 has for stdout and stderr,
        by descriptor (None: this process's). Raises StorageError, EnvironmentProblem.
        """
        log_path = spec.folder.log
        read_end, write_end = os.pipe()
        handles = [write_end, *([] if listener is None else [listener])]
        try:
            with log_path.open("ab") as log:
                stdout, stderr = screen if spec.is_rank0 else (log, log)
                process = ChildProcess(
                    [sys.executable, *spec.command_line(write_end, listener)],
                    end_signal=signal.SIGKILL,
                    stdout=stdout,
                    stderr=stderr,
                    env=environment,
                    pass_fds=handles,
                )
        except OSError as error:
            os.close(read_end)
            if isinstance(error, PermissionError):
                raise StorageError(f"cannot write {log_path}: {error.strerror}") from error
            raise EnvironmentProblem(f"cannot start {spec.name}: {error}") from error
        finally:
            os.close(write_end)
        return cls(spec, process, HeartbeatReader(read_end), cleanup)

    def is_running(self) -> bool:
        """Whether it still runs. Once False, its children are killed and its output was read."""
        if self.process.is_running():
            return True
        if self.heartbeat.open:
            if self.cleanup is not None:
                self.cleanup.forget(self.process.pid)
            self.heartbeat.receive()
            self.heartbeat.close()
        return False

    def signal(self, number: int) -> None:
        """Send a signal to the process alone."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """Kill the process and its children."""
        if self.is_running():
            self.killed = True
            self.process.kill()

    def wait_for_exit(self) -> ProcessExit:
        """How it ended; waits until it has."""
        while self.is_running():
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        log = display_path(self.spec.folder.log)
        return ProcessExit(self.spec.name, self.process.returncode, self.heartbeat.report, log, self.killed)

    def status(self) -> str:
        """The state of the process, one of psutil.STATUS_*; empty if it has ended."""
        try:
            return psutil.Process(self.process.pid).status()
        except psutil.NoSuchProcess:
            return ""


@dataclass(slots=True)
class WorkerStatusFile:
    """The status file that the launcher of a machine writes during an attempt."""

    folder: RunFolder
    attempt: int
    machine: int = 0
    due: float = 0.0

    def write(self, members: Sequence[WorkerProcess], replaced: Mapping[str, int], *, over: bool = False) -> None:
        """Write it, if it is due, or the attempt is `over`. replaced: number of restarts, by process name."""
        if time.monotonic() < self.due and not over:
            return
        self.due = time.monotonic() + BEAT_S
        here = Host.current()
        launcher = {"host": here.host, "boot_id": here.boot_id, "pid": os.getpid()}
        workers = [self._worker_status(member, replaced.get(member.spec.name, 0)) for member in members]
        content = {"attempt": self.attempt, "written": _now(), "over": over, "launcher": launcher, "members": workers}
        path = self.folder.members / f"{self.machine}.json"
        with suppress(OSError):
            path.parent.mkdir(exist_ok=True)
            staged = path.with_name(f".{path.name}")
            staged.write_text(json.dumps(content, indent=1))
            staged.replace(path)

    def _worker_status(self, member: WorkerProcess, replaced: int) -> dict[str, Any]:
        spec, heartbeat = member.spec, member.heartbeat
        return {
            "name": spec.name,
            "role": spec.role,
            "index": spec.index,
            **heartbeat.where,
            "runs": member.is_running(),
            "begun": heartbeat.begun,
            "step": heartbeat.step if spec.role == "rank" else None,
            "heard": _now() - (time.monotonic() - heartbeat.last_heard),
            "replaced": replaced,
            "log": str(spec.folder.log.relative_to(spec.folder.root)),
        }


def _now() -> float:
    """Seconds since 1970."""
    return datetime.now(UTC).timestamp()


def enable_stack_dumps(handle: int) -> None:
    """Dump every thread's stack to this descriptor on a crash, and when the supervisor requests it."""
    faulthandler.enable(handle)
    faulthandler.register(STACKS, handle, all_threads=True)


def dump_stacks(members: Sequence[WorkerProcess], lagging: Sequence[WorkerProcess]) -> list[str]:
    """Let each process write its stacks to its log; returns a line for each lagging process."""
    logs = {member.spec.name: member.spec.folder.log for member in members}
    before = {name: log.stat().st_size if log.exists() else 0 for name, log in logs.items()}
    for member in members:
        member.signal(STACKS)
    time.sleep(DUMP_S)
    return [f"{member.spec.name} {_activity_text(member, before[member.spec.name])}" for member in lagging]


def _activity_text(member: WorkerProcess, before: int) -> str:
    """What a process does, from the kernel and its main thread's stack; of a rank, also in which step."""
    step = [f"in step {member.heartbeat.step + 1}"] if member.spec.role == "rank" else []
    if stopped := STOPPED.get(member.status()):
        return " and ".join(f"is {words}" for words in (*step, stopped))
    log = member.spec.folder.log
    found = main_thread_location(log.read_bytes()[before:].decode(errors="replace")) if log.exists() else ""
    return f"is {', '.join((*step, found or 'at an unknown place: a library blocks its threads'))}"


def main_thread_location(stacks: str) -> str:
    """Location of the main thread outside of libraries (faulthandler writes it last); empty if unknown."""
    last = HEAD.split(stacks)[-1] if HEAD.search(stacks) else ""
    frames = list(FRAME.finditer(last))
    own = next((frame for frame in frames if not frame["file"].startswith(LIBRARIES)), next(iter(frames), None))
    return f"at {own['file']}:{own['line']}, in {own['function']}" if own else ""
