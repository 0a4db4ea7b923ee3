"""The process that feeds W&B or SwanLab, so that nothing the library does can slow or stop training.

    metrics.jsonl ─┐                                                  ┌─▶ wandb/ or swanlab/ in the run folder, or
    samples.jsonl ─┴─▶ read from the first line on ─▶ log ─▶ library ─┤   the server
    stdin: "done" or EOF ─▶ read to the end, finish, exit             └─▶ report: JSON lines through a pipe

It always reads from the first line, so that a restart omits nothing. If the library fails (no key, no server, a dead or
stuck wandb-core), the process restarts itself once, offline.

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
    """Parse the options; those from --report on are passed by the run, or by a restart."""
    parser = argparse.ArgumentParser(
        prog="python -m runner.tracker.upload_process", description="Feed a run's metrics to W&B or SwanLab."
    )
    parser.add_argument("settings", type=Path, help="wandb/sink.json or swanlab/sink.json of a run folder")
    parser.add_argument("--replay", action="store_true", help="upload the existing metrics and exit")
    parser.add_argument("--report", type=int, default=1, help=argparse.SUPPRESS)  # descriptor of the pipe to the run
    parser.add_argument("--parent", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--offline", default="", help=argparse.SUPPRESS)  # why this is a restart
    parser.add_argument("--status", default="", help=argparse.SUPPRESS)  # what the run sent before the restart
    parser.add_argument("--deadline", type=float, default=0.0, help=argparse.SUPPRESS)  # what is left of deadline_s
    return parser.parse_args(argv)


class Feed(Protocol):
    """An open run of a library.

    files: pattern of the folders of offline runs; folder: of this run; url: its page, empty offline; after: the last
    step that the server already has
    """

    files: ClassVar[str]
    folder: Path
    url: str
    after: int

    def __init__(self, settings: Mapping[str, Any], folder: Path, mode: str, watched_pid: int) -> None: ...

    @staticmethod
    def server() -> str: ...  # the address in the library's settings

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None: ...

    def finish(self, exit_code: int) -> bool: ...  # False: the upload is incomplete; the files are on the disk


class FeedLines:
    """Sends the lines of a run folder to a feed."""

    def __init__(self, feed: Feed, folder: Path) -> None:
        self._feed = feed
        self._metrics, self._samples = JsonlTail(folder / "metrics.jsonl"), JsonlTail(folder / "samples.jsonl")
        self.written = 0
        # Samples of the newest step, which may be incomplete: a step is logged once.
        self._held: list[dict[str, Any]] = []

    def feed_new_lines(self, *, at_end: bool = False) -> int:
        """Log new lines; returns their number. at_end: the run has ended."""
        metrics, samples = self._metrics.lines(), self._samples.lines()
        for line in metrics:
            if line["step"] > self._feed.after:
                values = {k: v for k, v in line.items() if k != "step" and v is not None}
                self._feed.log(line["step"], with_health_panel(values))
            self.written += 1
        by_step = groupby([*self._held, *samples], key=lambda one: int(one["step"]))
        steps = [(step, list(rows)) for step, rows in by_step]
        self._held = [] if (at_end and not samples) or not steps else steps.pop()[1]
        for step, rows in steps:
            if step > self._feed.after:
                self._feed.log_samples(step, [{k: v for k, v in row.items() if k != "step"} for row in rows])
        return len(metrics) + len(samples)


def _feed_class(library: str) -> type[Feed]:
    """The feed of a library, which is imported only here."""
    if library == "wandb":
        from runner.tracker.wandb_feed import WandbFeed

        return WandbFeed
    from runner.tracker.swanlab_feed import SwanlabFeed

    return SwanlabFeed


def why_unreachable(base_url: str) -> str:
    """Why a server cannot be reached, or "" if it responds within CONNECT_S seconds."""
    from runner.core.http_client import site_fault  # here, because an offline run needs no network

    return site_fault(base_url, CONNECT_S, proxies=True) or ""


class UploadProcess:
    """One start of the process."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._folder, self._library = options.settings.resolve().parent.parent, options.settings.resolve().parent.name
        self._settings: dict[str, Any] = json.loads(options.settings.read_text(encoding="utf-8"))
        self._deadline_s = math.inf if options.replay else options.deadline or self._settings["deadline_s"] * 0.9
        self._closing = Event()  # the run has ended
        self._end = math.inf  # monotonic time by which this process must end
        self._status = options.status
        self._call: tuple[str, float] | None = None  # the current call of the library, and its deadline
        self._services: list[processes.Identity] = []  # processes of the library, which run until `finish`
        self._leaving = Lock()
        self._environment = dict(os.environ)  # before wandb adds the address of its service

    def run(self) -> NoReturn:
        """Feed the library until the run ends; ends or replaces the process."""
        if self._options.replay:
            self._closing.set()
        Thread(target=self._watch, daemon=True).start()
        try:
            self._feed()
        except ImportError as error:
            self._fail(f"{self._library} cannot be imported: {error}")
        except Exception as error:  # the libraries raise any error; restart once, offline
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
            closing = self._closing.is_set()  # checked before reading, so that the last lines are read
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
        """In a separate thread: detect the run's end, a stuck call, and the deadline."""
        while True:
            if self._closing.is_set():
                time.sleep(LOOK_S)
            elif self._run_has_ended():
                self._end = time.monotonic() + self._deadline_s
                self._closing.set()
            call, now = self._call, time.monotonic()
            # reserve time for a restart
            reserve = 0.0 if self._options.offline else min(RESTART_S, 0.4 * self._deadline_s)
            if call and now > min(call[1], self._end - reserve):
                self._restart(f"{call[0]} does not return")
            has_ended = any(processes.process_identity(service[0]) != service for service in self._services)
            if has_ended and self._services:  # `finish` ends them, and forgets them before
                self._restart(f"a process of {self._library} ended early")
            if now > self._end:
                self._fail(f"not finished {self._deadline_s:.0f} s after the end of the run")

    def _run_has_ended(self) -> bool:
        """Whether stdin is closed, or the parent has ended while another process holds the pipe open."""
        if select.select([STDIN], [], [], LOOK_S)[0]:
            status = os.read(STDIN, 64)
            self._status += status.decode(errors="replace").strip()
            return not status
        return bool(self._options.parent) and os.getppid() != self._options.parent

    def _restart(self, reason: str) -> NoReturn:
        """Replace this process by one that writes offline; the second time, fail."""
        self._leave()
        if self._options.offline:
            self._give_up(reason)
        processes.kill(processes.descendants(os.getpid()))
        left = max(self._end - time.monotonic(), 1.0) if self._closing.is_set() else self._deadline_s
        options = ["--offline", redact(reason).splitlines()[0][:300], "--status", self._status]
        run = ["--deadline", str(left), "--parent", str(self._options.parent)]
        options += ["--replay"] if self._options.replay else run
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
    """Move earlier offline runs of this run to superseded/: the new one will be complete."""
    for old in folder.glob(pattern):
        (folder / "superseded").mkdir(exist_ok=True)
        os.replace(old, folder / "superseded" / old.name)


if __name__ == "__main__":
    UploadProcess(parse_options(sys.argv[1:])).run()
