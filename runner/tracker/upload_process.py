"""The process that feeds W&B or SwanLab, so that nothing the library does can slow or stop training.

    metrics.jsonl ─┐                                                  ┌─▶ wandb/ or swanlab/ in the run folder, or
    samples.jsonl ─┴─▶ read from the first line on ─▶ log ─▶ library ─┤   the server
    stdin: "done" or EOF ─▶ read to the end, finish, exit             └─▶ report: JSON lines through a pipe

It reads from the first line on whenever it starts, so a restarted one leaves nothing out. Whatever goes wrong
with the library (no key, no server, a dead or a stuck wandb-core), it starts itself once more, offline.

To write the files again from a finished run folder: python -m runner.tracker.upload_process --replay
RUN/wandb/sink.json (or RUN/swanlab/sink.json)
"""

from __future__ import annotations

import argparse
import json
import math
import os
import select
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, ClassVar, NoReturn, Protocol

import psutil

from runner.core import subprocess as processes
from runner.run_dir.manifest import redact
from runner.tracker.jsonl import JsonlTail
from runner.tracker.text import with_health_panel

POLL_S = 0.5
LOOK_S = 0.2
START_S = 30.0  # longest call that starts something
CALL_S = 15.0  # longest other call, before wandb-core counts as stuck
CONNECT_S = 3.0
RESTART_S = 8.0  # what an offline restart needs at the end of a run, at most
STDIN = 0


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """The options; the run, or a restart, passes those after --report."""
    parser = argparse.ArgumentParser(
        prog="python -m runner.tracker.upload_process", description="Feed a run's metrics to W&B or SwanLab."
    )
    parser.add_argument("settings", type=Path, help="wandb/sink.json or swanlab/sink.json of a run folder")
    parser.add_argument("--replay", action="store_true", help="upload the existing metrics and exit")
    parser.add_argument("--report", type=int, default=1, help=argparse.SUPPRESS)  # descriptor of the pipe to the run
    parser.add_argument("--parent", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--offline", default="", help=argparse.SUPPRESS)  # why this is a restart
    parser.add_argument("--status", default="", help=argparse.SUPPRESS)  # what the run said before the restart
    parser.add_argument("--deadline", type=float, default=0.0, help=argparse.SUPPRESS)  # what is left of deadline_s
    return parser.parse_args(argv)


class Feed(Protocol):
    """A run of a library that is open for writing.

    files: pattern of the folders of offline copies; folder: where this one lies; url: its page, empty offline; after:
    the last step that the server already has
    """

    files: ClassVar[str]
    folder: Path
    url: str
    after: int

    def __init__(self, settings: Mapping[str, Any], folder: Path, mode: str, watched_pid: int) -> None: ...

    @staticmethod
    def server() -> str: ...  # its address, as the library's own settings have it

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None: ...

    def finish(self, exit_code: int) -> bool: ...  # False: not everything was uploaded in time (it is on disk then)


class FeedLines:
    """Sends the lines of a run folder to a feed."""

    def __init__(self, feed: Feed, folder: Path) -> None:
        self._feed = feed
        self._metrics, self._samples = JsonlTail(folder / "metrics.jsonl"), JsonlTail(folder / "samples.jsonl")
        self.written = 0
        self._held: list[dict[str, Any]] = []  # samples of the newest step, which may go on: a step is logged once

    def feed_new_lines(self, *, at_end: bool = False) -> int:
        """Feed what has come; returns the number of lines read. at_end: the run has ended."""
        metrics, samples = self._metrics.lines(), self._samples.lines()
        for line in metrics:
            if line["step"] > self._feed.after:
                values = {k: v for k, v in line.items() if k != "step" and v is not None}
                self._feed.log(line["step"], with_health_panel(values))
            self.written += 1
        steps = [
            (step, list(rows)) for step, rows in groupby([*self._held, *samples], key=lambda one: int(one["step"]))
        ]
        self._held = [] if (at_end and not samples) or not steps else steps.pop()[1]
        for step, rows in steps:
            if step > self._feed.after:
                self._feed.log_samples(step, [{k: v for k, v in row.items() if k != "step"} for row in rows])
        return len(metrics) + len(samples)


def _feed_class(library: str) -> type[Feed]:
    """The library is imported here, and nowhere else."""
    if library == "wandb":
        from runner.tracker.wandb_feed import WandbFeed

        return WandbFeed
    from runner.tracker.swanlab_feed import SwanlabFeed

    return SwanlabFeed


def why_unreachable(base_url: str) -> str:
    """Why a server cannot be used, or "" if it answers anything within CONNECT_S seconds."""
    from aiohttp import ClientError  # here, because an offline run needs no network

    from runner.core.http_client import failure_reason, request, run_coroutine

    try:
        run_coroutine(request("HEAD", base_url, timeout_s=CONNECT_S, largest_bytes=0, proxies=True))
    except TimeoutError:
        return f"{base_url} does not respond within {CONNECT_S:.0f} s"
    except (OSError, ClientError) as error:
        return f"{base_url} cannot be reached ({failure_reason(error)})"
    return ""


class UploadProcess:
    """One start of the process."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._folder, self._library = options.settings.resolve().parent.parent, options.settings.resolve().parent.name
        self._settings: dict[str, Any] = json.loads(options.settings.read_text(encoding="utf-8"))
        self._deadline_s = math.inf if options.replay else options.deadline or self._settings["deadline_s"] * 0.9
        self._closing = Event()  # the run has ended
        self._end = math.inf  # monotonic time by which we have, too
        self._status = options.status
        self._call: tuple[str, float] | None = None  # the call to the library under way, and when it is overdue
        self._services: list[processes.Identity] = []  # what the library has started, which runs until `finish`
        self._leaving = Lock()
        self._environment = dict(os.environ)  # before wandb writes the address of its service into it

    def run(self) -> NoReturn:
        """Feed the library until the run ends; ends or replaces the process."""
        if self._options.replay:
            self._closing.set()
        Thread(target=self._watch, daemon=True).start()
        try:
            self._feed()
        except ImportError as error:
            self._fail(f"{self._library} cannot be imported: {error}")
        except Exception as error:  # they raise anything; whatever it is, it is tried once more, offline
            print(redact(traceback.format_exc()), end="", file=sys.stderr)
            self._restart(f"{type(error).__name__}: {error}")
        self._leave()
        self._exit(0)

    def _feed(self) -> None:
        why = self._options.offline
        mode = "offline" if why else self._settings["mode"]
        with self._limit_call("setup", START_S):
            feed_class = _feed_class(self._library)
            if mode == "online" and (why := why_unreachable(feed_class.server())):
                mode = "offline"
        if mode == "offline":
            move_superseded(self._options.settings.parent, feed_class.files)
        with self._limit_call("init", START_S):
            feed = feed_class(self._settings, self._folder, mode, self._options.parent or os.getpid())
        where = os.path.relpath(feed.folder, self._folder)
        below = [processes.process_identity(process.pid) for process in processes.descendants(os.getpid())]
        ours = [identity for identity in below if identity is not None]
        self._report("open", mode=mode, why=why, folder=where, url=feed.url if mode == "online" else "", processes=ours)
        children = {child.pid for child in psutil.Process().children()}
        self._services = [identity for identity in ours if identity[0] in children]
        lines_of_run = FeedLines(feed, self._folder)
        while True:
            closing = self._closing.is_set()  # checked before reading: what the run wrote before its end is then there
            with self._limit_call("log", CALL_S):
                lines = lines_of_run.feed_new_lines(at_end=closing)
            if closing and not lines:
                break
            if not lines:
                self._closing.wait(POLL_S)
        self._services = []
        with self._limit_call("finish", math.inf):
            whole = feed.finish(0 if self._status == "done" or self._options.replay else 1)
        self._report("done", steps=lines_of_run.written, whole=whole)

    @contextmanager
    def _limit_call(self, name: str, limit_s: float) -> Iterator[None]:
        self._call = (f"{self._library}.{name}", time.monotonic() + limit_s)
        try:
            yield
        finally:
            self._call = None

    def _watch(self) -> None:
        """In a thread of its own: notice the run's end, a call that is stuck, and the deadline."""
        while True:
            if self._closing.is_set():
                time.sleep(LOOK_S)
            elif self._run_has_ended():
                self._end = time.monotonic() + self._deadline_s
                self._closing.set()
            call, now = self._call, time.monotonic()
            # While a restart is possible, time is kept for it.
            reserve = 0.0 if self._options.offline else min(RESTART_S, 0.4 * self._deadline_s)
            if call and now > min(call[1], self._end - reserve):
                self._restart(f"{call[0]} does not return")
            has_ended = any(processes.process_identity(service[0]) != service for service in self._services)
            if has_ended and self._services:  # `finish` ends them, and forgets them before
                self._restart(f"a process of {self._library} ended early")
            if now > self._end:
                self._fail(f"not finished {self._deadline_s:.0f} s after the end of the run")

    def _run_has_ended(self) -> bool:
        """Whether stdin is at its end, or the parent has ended while another process holds the pipe open."""
        if select.select([STDIN], [], [], LOOK_S)[0]:
            said = os.read(STDIN, 64)
            self._status += said.decode(errors="replace").strip()
            return not said
        return bool(self._options.parent) and os.getppid() != self._options.parent

    def _restart(self, reason: str) -> NoReturn:
        """Become a new process that writes offline; the second time, give up."""
        self._leave()
        if self._options.offline:
            self._give_up(reason)
        processes.kill(processes.descendants(os.getpid()))
        left = max(self._end - time.monotonic(), 1.0) if self._closing.is_set() else self._deadline_s
        options = ["--offline", redact(reason).splitlines()[0][:300], "--status", self._status]
        options += (
            ["--replay"] if self._options.replay else ["--deadline", str(left), "--parent", str(self._options.parent)]
        )
        command = [sys.executable, "-P", "-m", "runner.tracker.upload_process", str(self._options.settings)]
        arguments = [*command, "--report", str(self._options.report), *options]
        os.execve(sys.executable, arguments, self._environment)

    def _fail(self, reason: str) -> NoReturn:
        self._leave()
        self._give_up(reason)

    def _leave(self) -> None:
        """Let one thread end this process; the other waits for that."""
        if not self._leaving.acquire(blocking=False):
            while True:
                time.sleep(1.0)

    def _give_up(self, reason: str) -> NoReturn:
        self._report("failed", reason=redact(reason))
        self._exit(1)

    def _exit(self, code: int) -> NoReturn:
        sys.stderr.flush()
        processes.kill(processes.descendants(os.getpid()))
        os._exit(code)  # a plain exit would wait for the library's own handlers, up to 10 s where the server is silent

    def _report(self, event: str, **facts: Any) -> None:
        line = json.dumps({"event": event, **facts}) + "\n"
        try:
            os.write(self._options.report, line.encode())
        except OSError as error:  # the reader is gone
            print(f"could not report ({error.strerror}): {line}", file=sys.stderr, flush=True)


def move_superseded(folder: Path, pattern: str) -> None:
    """Move earlier offline copies of this run to superseded/: the new copy is complete."""
    for old in folder.glob(pattern):
        (folder / "superseded").mkdir(exist_ok=True)
        os.replace(old, folder / "superseded" / old.name)


if __name__ == "__main__":
    UploadProcess(parse_options(sys.argv[1:])).run()
