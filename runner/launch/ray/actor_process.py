"""A process of a job that a Ray actor starts on its node: start, read output, signal, kill.

actor: ActorProcess ─ a thread ─▶ LocalWorker ─▶ rank, sampler
       hear() ◀── what it said to its launcher, its screen (rank 0), its state, its end
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from pydantic import TypeAdapter

from runner.core.device_kinds import KINDS
from runner.core.errors import EnvironmentProblem, RunnerError
from runner.core.rank_info import without_rank_variables
from runner.launch.cleanup_process import CleanupProcess
from runner.launch.exit_cause import ExitReport, HeartbeatReader
from runner.launch.multi_node import SAMPLER_HOST, gloo_interface
from runner.launch.worker_process import LocalWorker, WorkerSpec

TICK_S = 0.05
CHUNK = 2**14  # bytes of each stream in one answer: small ones go without Ray's object store
WORKER_SPEC = TypeAdapter(WorkerSpec)  # to and from JSON
MAX_BUFFERED = 2**20  # bytes not fetched yet, at which the process has to wait


def worker_environment(carried: Mapping[str, str], kind: str, devices: Sequence[str], alike: int) -> dict[str, str]:
    """Environment of a process on this node: the node's own without Ray's variables, and the job's.

    kind: of the device; devices: those that Ray has given to it; alike: processes of the job on this node
    """
    own = {name: value for name, value in without_rank_variables(os.environ).items() if not name.startswith("RAY_")}
    own["OMP_NUM_THREADS"] = str(max(len(os.sched_getaffinity(0)) // alike, 1))  # what is there is Ray's
    variable = KINDS[kind].visible
    return {**own, **carried, **({variable: ",".join(devices)} if variable is not None else {})}


class ActorProcess:
    """The process. One thread starts it and stays: the kernel ends a child with the thread that made it.

    environment: all but what the order adds; listener: the socket of the ranks' store, which is closed here
    """

    def __init__(self, order: WorkerSpec, environment: Mapping[str, str], listener: int | None) -> None:
        self._order, self._environment, self._listener = order, environment, listener
        self._said: dict[str, bytes] = {"pipe": b"", "out": b"", "err": b""}
        self._member: LocalWorker | None = None
        self._doomed = False  # it was killed, maybe before it began
        self._code: int | None = None
        self._news = threading.Condition()
        threading.Thread(target=self._run_thread, name="child", daemon=True).start()

    def hear(self, wait_s: float) -> dict[str, Any]:
        """What is new after at most `wait_s` seconds: messages, screen output, state, and at last exit code."""
        with self._news:
            self._news.wait_for(lambda: self._code is not None or any(self._said.values()), wait_s)
            news = {name: content[:CHUNK].decode("latin-1") for name, content in self._said.items()}
            self._said = {name: content[CHUNK:] for name, content in self._said.items()}
            status = "" if self._member is None else self._member.status()
            return {**news, "status": status, "code": None if any(self._said.values()) else self._code}

    def signal(self, number: int) -> None:
        """Send the process, and nothing that it started, a signal."""
        if self._member is not None and self._code is None:
            self._member.signal(number)

    def kill(self) -> None:
        """End it and what it started; one that is yet to begin ends as it does."""
        self._doomed = True
        if self._member is not None and self._code is None:
            self._member.signal(signal.SIGKILL)  # what it has started: at once after it, by its thread

    def _run_thread(self) -> None:
        code = RunnerError.exit_code
        try:
            with closing(CleanupProcess()) as janitor:  # where this actor is killed, too, nothing is left of it
                janitor.remove(*self._order.scratch)
                code = self._run(janitor)
        except Exception as error:
            code = self._report(error)
        finally:  # whatever happened: another process waits for its end
            with self._news:
                self._code = code
                self._news.notify_all()

    def _report(self, error: Exception) -> int:
        """Say in the process's place why it cannot run; its exit code."""
        if not isinstance(error, RunnerError):
            where = f"{self._order.name}, on {socket.gethostname()}"
            error = RunnerError(f"{where}: {type(error).__name__}: {error}")
        self._append_output("pipe", json.dumps({"report": ExitReport.from_error(error)}).encode() + b"\n")
        return error.exit_code

    def _run(self, janitor: CleanupProcess) -> int:
        folder = self._order.folder
        if not folder.spec.is_file():
            text = f"cannot see the run's folder {folder.root} on {socket.gethostname()}"
            raise EnvironmentProblem(f"{text}; use storage that all nodes share")
        (out, telling_out), (err, telling_err) = os.pipe(), os.pipe()
        given = (telling_out, telling_err, *([] if self._listener is None else [self._listener]))
        try:
            environment = {**self._environment, **self._order.environment}
            if SAMPLER_HOST in environment:
                environment = {**gloo_interface(environment[SAMPLER_HOST]), **environment}
            screen = (telling_out, telling_err)
            member = self._member = LocalWorker.start(self._order, environment, self._listener, janitor, screen)
            if self._doomed:  # before there was anybody to kill: `kill` sets this first, and looks for a member then
                member.signal(signal.SIGKILL)
        finally:
            for handle in given:
                os.close(handle)
        assert member.heartbeat.handle is not None
        streams = {member.heartbeat.handle: "pipe", out: "out", err: "err"}
        member.heartbeat = HeartbeatReader()  # the launcher has the other one
        self._relay(member, streams)
        return int(member.process.returncode)

    def _relay(self, member: LocalWorker, streams: dict[int, str]) -> None:
        """Take in what comes until the process has ended, and the rest."""
        for handle in streams:
            os.set_blocking(handle, False)
        runs = True
        while runs:
            runs = member.is_running()
            wanted = [handle for handle, name in streams.items() if len(self._said[name]) < MAX_BUFFERED or not runs]
            time.sleep(0 if wanted else TICK_S)
            for handle in select.select(wanted, [], [], TICK_S if runs else 0)[0]:
                if content := os.read(handle, MAX_BUFFERED):
                    self._append_output(streams[handle], content)
                else:
                    os.close(handle)
                    del streams[handle]
        for handle in streams:  # what a process that it has left behind may hold open
            os.close(handle)

    def _append_output(self, name: str, content: bytes) -> None:
        with self._news:
            self._said[name] += content
            self._news.notify_all()
