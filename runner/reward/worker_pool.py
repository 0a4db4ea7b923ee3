"""Worker processes for a user's reward function: started on demand, killed when they hang, replaced.

call ──▶ an idle worker, or a new one ──▶ answer in time            ─▶ GroupScores
                                      ├─▶ no answer: killed          ─▶ no score, and a warning
                                      ├─▶ it was killed (SIGKILL)    ─▶ one more try, with a new one
                                      └─▶ it died: removed           ─▶ no score, and a warning
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from queue import LifoQueue
from typing import Any

from runner.interfaces.rewards import GroupScores, ScoringFailure, encode_json, unscored_group
from runner.reward import worker
from runner.user_code.process import (
    KILLED,
    CapturedOutput,
    FunctionTarget,
    UserProcess,
    WorkerDiedError,
    WorkerStartError,
)

log = logging.getLogger("runner")
PROGRAM = Path(worker.__file__)


class WorkerPool:
    """At most `workers` processes. `call` may be used by as many threads at a time."""

    def __init__(self, target: FunctionTarget, workers: int, timeout_s: float, output: CapturedOutput) -> None:
        self._target, self._timeout_s, self._output = target, timeout_s, output
        self._idle: LifoQueue[UserProcess | None] = LifoQueue()
        self.workers = workers
        for _ in range(workers):
            self._idle.put(None)

    def start(self) -> None:
        """Start one process now, so that what is wrong with the file is known. Raises WorkerStartError."""
        self._idle.get()
        process = None
        try:
            process = UserProcess(PROGRAM, self._target, self._output)
        finally:
            self._idle.put(process)

    def call(self, arguments: Mapping[str, Any], size: int, seed: int) -> GroupScores:
        """The function's scores of `size` samples. `seed` is given to the global random generators before."""
        content = {"arguments": arguments, "size": size, "seed": seed, "timeout_s": self._timeout_s}
        question = encode_json(content)
        try:
            try:
                return self._ask_worker(question, size)
            except WorkerDiedError as error:
                if str(error) != KILLED:  # it may come from outside, or from the kernel: another one may live
                    raise
                log.warning("a reward worker was killed (SIGKILL); a new worker scores its group again")
                return self._ask_worker(question, size)
        except WorkerDiedError as error:
            return unscored_group(size, "the worker exited", f"the worker exited: {error}")

    def _ask_worker(self, question: bytes, size: int) -> GroupScores:
        """What an idle worker, or a new one, answers. Raises WorkerDiedError."""
        process, kept = self._idle.get(), None
        try:
            process = process or UserProcess(PROGRAM, self._target, self._output)
            answer = process.request(question, self._timeout_s)
            kept = process
        except WorkerStartError as error:
            return unscored_group(size, "no worker", f"a new worker cannot start: {error}")
        except TimeoutError:
            assert process is not None
            message = f"no response within {self._timeout_s:g} s{process.hang_location()}; the worker was killed"
            process.end()
            return unscored_group(size, "timeout", message)
        except EOFError as error:
            assert process is not None
            raise WorkerDiedError(process.exit_reason()) from error
        except BaseException:  # no caller waits for the response any more
            if process is not None:
                process.end()
            raise
        finally:
            self._idle.put(kept)
        return self._to_group_scores(answer)

    def close(self) -> None:
        """End every process; none may be in use."""
        for process in [self._idle.get() for _ in range(self.workers)]:
            if process is not None:
                process.end()
            self._idle.put(None)
        self._output.close()

    def _to_group_scores(self, answer: Mapping[str, Any]) -> GroupScores:
        if "trace" in answer:
            self._output.append_to_file(answer["trace"])
        if answer.get("logged"):
            self._output.append_logged(answer["logged"])
        failures = tuple(ScoringFailure(*fault) for fault in answer["faults"])
        return GroupScores(answer["values"], failures, raised="trace" in answer)
