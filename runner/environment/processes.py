"""The processes of episodes, and the count of episodes that are left out."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

from runner.core.errors import EnvironmentProblem
from runner.core.subprocess import JsonLines
from runner.core.tool_formats import Tools
from runner.environment import worker
from runner.interfaces.rewards import FailureCounts, encode_json
from runner.user_code.process import START_S, CapturedOutput, FunctionTarget, UserProcess

log = logging.getLogger("runner")
PROGRAM = Path(worker.__file__)
REPLY_BYTES = 1 << 28


class EpisodeFailure(Exception):
    """Why an episode is left out; the first argument is its kind."""


def failure_kind(failure: EpisodeFailure | None) -> str:
    """Why an episode is left out; empty if it is not."""
    return "" if failure is None else str(failure.args[0])


class EpisodeProcess:
    """The process of one episode, which ends with its socket."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._lines = JsonLines(channel.fileno(), channel.fileno(), REPLY_BYTES)

    def request(self, content: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """The reply. Raises EpisodeFailure."""
        end, replies = time.monotonic() + timeout_s, list[Any]()
        try:
            self._lines.write(encode_json(content) + b"\n", timeout_s)
            while not replies:
                if (wait_s := end - time.monotonic()) <= 0:
                    raise TimeoutError
                if (arrived := self._lines.receive(wait_s)) is None:
                    raise EpisodeFailure("died", "its process exited")
                replies = arrived
        except TimeoutError as error:
            text = f"no reply within environment.timeout_s={timeout_s:g}; its process was killed"
            raise EpisodeFailure("timeout", text) from error
        except ValueError as error:
            raise EpisodeFailure("wrong reply", f"invalid reply: {error}") from error
        reply: dict[str, Any] = replies[0]
        if "failed" in reply:
            raise EpisodeFailure(reply["failed"], reply["message"], reply["trace"])
        return reply

    def kill(self) -> None:
        """End the process and all that it started; a thread that waits for its reply gets EpisodeFailure."""
        with suppress(OSError):  # it has ended
            self._channel.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """The same, where no thread waits for it."""
        self._channel.close()


class EpisodeProcesses:
    """Starts processes of episodes: forks of one that has imported the user's file.

    Raises WorkerStartError where that does not start.
    """

    def __init__(self, target: FunctionTarget, output: CapturedOutput) -> None:
        self._target, self.output, self._lock = target, output, Lock()
        self._worker = UserProcess(PROGRAM, target, output)
        self.tools: Tools = self._worker.ready["tools"]
        self.is_class: bool = self._worker.ready["is_class"]

    def start(self) -> EpisodeProcess:
        """A new episode; where the process that forks it has died, another one is started."""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            try:
                self._worker.send_descriptor(theirs.fileno(), START_S)
            except OSError:
                log.warning("the process that starts episodes exited: %s; a new one starts", self._worker.end())
                self._worker = UserProcess(PROGRAM, self._target, self.output)
                self._worker.send_descriptor(theirs.fileno(), START_S)
        return EpisodeProcess(ours)

    def close(self) -> None:
        """End all of them."""
        self._worker.end()
        self.output.close()


class EpisodeFailures:
    """Counts episodes that are left out, logs each kind once, and raises when one after another fails."""

    def __init__(self, label: str, max_failures: int, output: CapturedOutput) -> None:
        self._label, self._max_failures, self._output = label, max_failures, output
        self._counts = FailureCounts(label)
        self._in_a_row = self._episodes = 0

    def record(self, failure: EpisodeFailure | None) -> None:
        """Count an episode. Raises EnvironmentProblem after `max_failures` failures in a row."""
        self._episodes += 1
        if failure is None:
            self._in_a_row = 0
            return
        kind, message, *trace = map(str, failure.args)
        self._counts.add(kind, f"an episode is left out: {message}")
        for text in trace:
            self._output.append_to_file(text)
        self._in_a_row += 1
        if self._in_a_row >= self._max_failures:
            text = f"{self._label}: {self._in_a_row} episodes in a row failed (environment.max_failures); the last one:"
            raise EnvironmentProblem(f"{text}\n  {message}\n  fix the environment")

    def close(self) -> None:
        """Warn how many episodes were left out, by kind."""
        self._counts.log_total(self._episodes, "episodes were left out")
