"""The command `run` in a process of its own, forked from a server that has imported torch and transformers once.

What a user sees is real: arguments, folder, environment, output, signals, exit code. Only the four seconds of imports
are shared, so a test of what happens before or during them starts `python -m runner` itself. Variables that libraries
read while they are imported come too late here, and are refused.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRELOAD = [
    "runner.cli.main",
    "runner.build",
    "runner.model.tiny",
    "runner.algorithm.sft",
    "runner.launch.local",
]
TIMEOUT_S = 250.0
READ_AT_IMPORT = re.compile(r"(HF|TRANSFORMERS|OMP|MKL|CUBLAS|TORCH)_|PYTORCH_.*ALLOC_CONF")


class Command:
    """A started command; the methods are those of subprocess.Popen. Output goes to the end of the file `printed`.

    hold_at: a run in this process waits for `release` when this step is on record, so that it does not end unseen
    """

    def __init__(self, *words: str, cwd: Path, printed: Path, hold_at: int | None = None, **environment: str) -> None:
        late = list(filter(READ_AT_IMPORT.match, environment))
        assert not late, f"{late} are read at import: start python -m runner"
        own = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
        self._printed, self._begin = printed, printed.stat().st_size if printed.exists() else 0
        self._released = printed.with_name(f"{printed.name}-{time.monotonic_ns()}-released")
        hold = None if hold_at is None else (hold_at, self._released)
        self._process = _context().Process(target=_serve, args=(words, str(cwd), own, str(printed), hold))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            assert timeout is not None
            raise AssertionError(f"it did not end within {timeout:.0f} s:\n{self.said()}")
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended since
                os.kill(self.pid, number)

    def release(self) -> None:
        """Let it continue after `hold_at`."""
        self._released.touch()

    def said(self) -> str:
        """What it has printed so far."""
        with self._printed.open("rb") as file:
            file.seek(self._begin)
            return file.read().decode()


def run(*words: str, cwd: Path, code: int = 0, timeout_s: float = TIMEOUT_S, **environment: str) -> str:
    """Run a command to its end, which must be with `code`; returns what it printed."""
    with tempfile.NamedTemporaryFile() as printed:
        command = Command(*words, cwd=cwd, printed=Path(printed.name), **environment)
        try:
            assert command.wait(timeout_s) == code, command.said()
        finally:
            command.kill()
        return command.said()


@cache
def _context() -> ForkServerContext:
    """Fork server of this process, which ends with it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *PRELOAD])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(ROOT)
    try:
        context.Process(target=_nothing).start()
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before
    return context


def _nothing() -> None:
    """Start the server."""


def _hold(step: int, released: Path) -> None:
    """Let what logs this step, or a later one, wait for a file."""
    from runner.tracker.jsonl import JsonlTracker

    log = JsonlTracker.log

    def log_and_wait(tracker: JsonlTracker, at: int, metrics: Mapping[str, float]) -> None:
        log(tracker, at, metrics)
        while at >= step and not released.exists():
            time.sleep(0.01)

    JsonlTracker.log = log_and_wait  # type: ignore[method-assign]


def _serve(
    words: tuple[str, ...], cwd: str, environment: dict[str, str], printed: str, hold: tuple[int, Path] | None
) -> None:
    """Become the command: its folder, environment, output and signals, then its exit code."""
    from runner.cli.main import main

    if hold is not None:
        _hold(*hold)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which is ignored where the tests run under nohup
    output = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    sys.argv = ["run", *words]
    try:
        sys.exit(main())
    finally:
        atexit._run_exitfuncs()
