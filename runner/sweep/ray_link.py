"""The line to Ray's driver, a process of its own (runner.sweep.ray_driver): requests one way, events the other."""

from __future__ import annotations

import json
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Set
from contextlib import suppress
from types import TracebackType
from typing import Any

from runner.errors import EnvironmentProblem

READY_S = 180.0  # for Ray to start or be reached: seconds on a free machine, a minute on a busy one
ANSWER_S = 60.0
KNOCK_S = 10.0
END_S = 30.0  # for Ray to shut down, once the jobs have ended
POLL_S = 0.05
TAIL = 5  # lines of what Ray printed that an error shows
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # what makes Ray take 127.0.0.1 for this machine's address
QUIET = {"RAY_USAGE_STATS_ENABLED": "0"}  # Ray reports its use to its makers, unless it is told not to


class Link:
    """Ray's driver, from start to end. `nodes`: what each node has; `gone`: jobs without an actor any more, and why."""

    def __init__(self, asked: Mapping[str, Any]) -> None:
        self.nodes: list[Mapping[str, float]] = []
        self.gone: dict[str, str] = {}
        self._asked, self._rest = asked, b""
        self._found: set[str] = set()
        self._refused = ""

    def __enter__(self) -> Link:
        """Raises EnvironmentProblem where Ray cannot be started or reached."""
        self._knock()
        self._output = tempfile.TemporaryFile()  # what Ray prints; it has no name to be left behind
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "runner.sweep.ray_driver", json.dumps(self._asked)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._output,
            env=self._environment(),
            start_new_session=True,  # Ctrl-C is for the sweep
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self._stdout.fileno(), False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._stdout, selectors.EVENT_READ)
        try:
            self._await(lambda: bool(self.nodes), READY_S)
        except BaseException:
            self._close(0.0)  # it may never come to read that it is to end
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._close(self._asked["grace_s"] + END_S)

    def _environment(self) -> dict[str, str]:
        """A cluster of our own is heard on this machine only, and has a password of its own."""
        own = {**LOOPBACK, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        return {**os.environ, **QUIET, **({} if self._asked["address"] else own)}

    def send(self, **request: Any) -> None:
        """Ask something of the driver. One that has died is told of by `hear`."""
        with suppress(BrokenPipeError):
            self._stdin.write(json.dumps(request).encode() + b"\n")
            self._stdin.flush()

    def hear(self, wait_s: float = 0.0) -> None:
        """Take in what the driver has said. Raises EnvironmentProblem where it has died."""
        if not self._selector.select(wait_s):
            return
        chunk = self._stdout.read(1 << 16)
        if chunk == b"":
            why = self._refused or f"Ray's driver has ended ({self._tail() or 'it said nothing'})"
            raise EnvironmentProblem(f"{self._where()}: {why}")
        *lines, self._rest = (self._rest + (chunk or b"")).split(b"\n")
        for line in lines:
            self._take(json.loads(line))

    def hear_of(self, tokens: Set[str]) -> None:
        """Wait until each of these jobs is known to be found or gone. Raises EnvironmentProblem."""
        self._await(lambda: tokens <= self._found | self.gone.keys(), ANSWER_S)

    def _await(self, is_so: Any, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not is_so():
            if time.monotonic() > end:
                raise EnvironmentProblem(f"{self._where()}: no answer within {seconds:g} s ({self._tail()})")
            self.hear(0.2)

    def _take(self, event: Mapping[str, Any]) -> None:
        if event["is"] == "ready":
            self.nodes = event["nodes"]
        elif event["is"] == "refused":
            self._refused = event["why"]
        elif event["is"] == "found":
            self._found.add(event["token"])
        else:
            self.gone[event["token"]] = event["why"]

    def _knock(self) -> None:
        """Raise EnvironmentProblem where nobody listens: Ray would try for minutes."""
        host, _, port = (self._asked["address"] or "").rpartition(":")
        if not port.isdecimal():
            return
        try:
            socket.create_connection((host.strip("[]"), int(port)), KNOCK_S).close()
        except OSError as error:
            advice = "`ray start --head` says the address of a cluster"
            raise EnvironmentProblem(f"{self._where()}: nobody listens there ({error}); {advice}") from error

    def _close(self, within_s: float) -> None:
        """End the driver, and with a cluster of our own all of it, also where the driver was killed."""
        with suppress(BrokenPipeError):
            self._stdin.close()
        pid, end = self._process.pid, time.monotonic() + within_s
        while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None and time.monotonic() < end:
            time.sleep(POLL_S)
        with suppress(ProcessLookupError, PermissionError):  # nobody is left in its group
            os.killpg(pid, signal.SIGKILL)  # before it is reaped: until then nobody else can have its number
        self._process.wait()
        self._stdout.close()
        self._selector.close()
        self._output.close()

    def _where(self) -> str:
        address = self._asked["address"]
        return f"Ray at {address}" if address else "Ray on this machine"

    def _tail(self) -> str:
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").splitlines()
        return " | ".join(line.strip() for line in lines[-TAIL:])
