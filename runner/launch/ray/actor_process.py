"""A process of a job that a Ray actor starts on its node: start, read output, signal, kill.

actor: ActorProcess ─ a thread ─▶ LocalWorker ─▶ rank, sampler
       receive() ◀── heartbeat messages, screen output (rank 0), state, exit code
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
from runner.launch.heartbeat import ExitReport, HeartbeatReader
from runner.launch.multi_node import SAMPLER_HOST, gloo_interface
from runner.launch.worker_process import LocalWorker, WorkerSpec

TICK_S = 0.05
CHUNK = 2**14  # bytes of each stream in one answer: Ray sends small ones without its object store
WORKER_SPEC = TypeAdapter(WorkerSpec)  # to and from JSON
MAX_BUFFERED = 2**20  # unfetched bytes at which the process must wait


def worker_environment(forwarded: Mapping[str, str], kind: str, devices: Sequence[str], alike: int) -> dict[str, str]:
    """Environment of a process on this node: the node's own without Ray's variables, and the job's.

    kind: of the device; devices: assigned by Ray; alike: number of the job's processes on this node
    """
    own = {name: value for name, value in without_rank_variables(os.environ).items() if not name.startswith("RAY_")}
    own["OMP_NUM_THREADS"] = str(max(len(os.sched_getaffinity(0)) // alike, 1))  # replaces Ray's value
    variable = KINDS[kind].visible
    return {**own, **forwarded, **({variable: ",".join(devices)} if variable is not None else {})}


class ActorProcess:
    """A process of the job. Its thread lives as long: the kernel kills a child with its parent thread.

    environment: without the variables of the spec; listener: the socket of the ranks' store, which is closed here
    """

    def __init__(self, spec: WorkerSpec, environment: Mapping[str, str], listener: int | None) -> None:
        self._spec, self._environment, self._listener = spec, environment, listener
        self._said: dict[str, bytes] = {"pipe": b"", "out": b"", "err": b""}
        self._member: LocalWorker | None = None
        self._is_killed = False  # maybe before it started
        self._code: int | None = None
        self._news = threading.Condition()
        threading.Thread(target=self._run_thread, name="child", daemon=True).start()

    def receive(self, wait_s: float) -> dict[str, Any]:
        """New messages and screen output after at most `wait_s` seconds, state, and at the end the exit code."""
        with self._news:
            self._news.wait_for(lambda: self._code is not None or any(self._said.values()), wait_s)
            news = {name: content[:CHUNK].decode("latin-1") for name, content in self._said.items()}
            self._said = {name: content[CHUNK:] for name, content in self._said.items()}
            status = "" if self._member is None else self._member.status()
            return {**news, "status": status, "code": None if any(self._said.values()) else self._code}

    def signal(self, number: int) -> None:
        """Send a signal to the process alone."""
        if self._member is not None and self._code is None:
            self._member.signal(number)

    def kill(self) -> None:
        """Kill the process and its children; one that has not started is killed when it does."""
        self._is_killed = True
        if self._member is not None and self._code is None:
            self._member.signal(signal.SIGKILL)  # then its thread kills the children

    def _run_thread(self) -> None:
        code = RunnerError.exit_code
        try:
            with closing(CleanupProcess()) as cleanup:  # cleans up if this actor is killed
                cleanup.remove(*self._spec.scratch)
                code = self._run(cleanup)
        except Exception as error:
            code = self._report(error)
        finally:  # the launcher waits for the exit code
            with self._news:
                self._code = code
                self._news.notify_all()

    def _report(self, error: Exception) -> int:
        """Report why the process cannot start; returns its exit code."""
        if not isinstance(error, RunnerError):
            where = f"{self._spec.name}, on {socket.gethostname()}"
            error = RunnerError(f"{where}: {type(error).__name__}: {error}")
        self._append_output("pipe", json.dumps({"report": ExitReport.from_error(error)}).encode() + b"\n")
        return error.exit_code

    def _run(self, cleanup: CleanupProcess) -> int:
        folder = self._spec.folder
        if not folder.spec.is_file():
            text = f"cannot see the run's folder {folder.root} on {socket.gethostname()}"
            raise EnvironmentProblem(f"{text}; use storage that all nodes share")
        (out, telling_out), (err, telling_err) = os.pipe(), os.pipe()
        given = (telling_out, telling_err, *([] if self._listener is None else [self._listener]))
        try:
            environment = {**self._environment, **self._spec.environment}
            if SAMPLER_HOST in environment:
                environment = {**gloo_interface(environment[SAMPLER_HOST]), **environment}
            screen = (telling_out, telling_err)
            member = self._member = LocalWorker.start(self._spec, environment, self._listener, cleanup, screen)
            if self._is_killed:  # `kill` was called before the process existed
                member.signal(signal.SIGKILL)
        finally:
            for handle in given:
                os.close(handle)
        assert member.heartbeat.handle is not None
        streams = {member.heartbeat.handle: "pipe", out: "out", err: "err"}
        member.heartbeat = HeartbeatReader()  # the launcher reads the heartbeat
        self._relay(member, streams)
        return int(member.process.returncode)

    def _relay(self, member: LocalWorker, streams: dict[int, str]) -> None:
        """Read output until the process has ended, then the rest."""
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
        for handle in streams:  # a surviving child may hold them open
            os.close(handle)

    def _append_output(self, name: str, content: bytes) -> None:
        with self._news:
            self._said[name] += content
            self._news.notify_all()
