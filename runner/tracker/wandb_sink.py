"""The process that feeds W&B, so that nothing W&B does can slow or stop training.

    metrics.jsonl ─┐                                                ┌─▶ wandb/ in the run folder, or the server
    samples.jsonl ─┴─▶ read from the first line on ─▶ log ─▶ wandb ─┤
    stdin: "done" or EOF ─▶ read to the end, finish, exit           └─▶ report: JSON lines through a pipe

It reads from the first line on whenever it starts, so a restarted one leaves nothing out. Whatever goes wrong
with W&B (no key, no server, a dead or a stuck wandb-core), it starts itself once more, offline.

To make W&B's files again from a finished run folder: python -m runner.tracker.wandb_sink --replay RUN/wandb/sink.json
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, NoReturn

from runner.core import subprocess as processes
from runner.run_dir.manifest import redact
from runner.tracker import wandb_feed

POLL_S = 0.5
LOOK_S = 0.2
START_S = 30.0  # longest call that starts something
CALL_S = 15.0  # longest other call, before wandb-core counts as stuck
RESTART_S = 8.0  # what an offline restart needs at the end of a run, at most
STDIN = 0


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """The options; the run, or a restart, passes those after --report."""
    parser = argparse.ArgumentParser(
        prog="python -m runner.tracker.wandb_sink", description="Feed a run's metrics to W&B."
    )
    parser.add_argument("settings", type=Path, help="wandb/sink.json of a run folder")
    parser.add_argument("--replay", action="store_true", help="upload the existing metrics and exit")
    parser.add_argument("--report", type=int, default=1, help=argparse.SUPPRESS)  # descriptor of the pipe to the run
    parser.add_argument("--parent", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--offline", default="", help=argparse.SUPPRESS)  # why this is a restart
    parser.add_argument("--status", default="", help=argparse.SUPPRESS)  # what the run said before the restart
    parser.add_argument("--deadline", type=float, default=0.0, help=argparse.SUPPRESS)  # what is left of deadline_s
    return parser.parse_args(argv)


class WandbSink:
    """One start of the sink."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._folder = options.settings.resolve().parent.parent
        self._settings: dict[str, Any] = json.loads(options.settings.read_text(encoding="utf-8"))
        self._deadline_s = math.inf if options.replay else options.deadline or self._settings["deadline_s"] * 0.9
        self._closing = Event()  # the run has ended
        self._end = math.inf  # monotonic time by which we have, too
        self._status = options.status
        self._call: tuple[str, float] | None = None  # the call to wandb under way, and when it is overdue
        self._leaving = Lock()
        self._environment = dict(os.environ)  # before wandb writes the address of its service into it

    def run(self) -> NoReturn:
        """Feed W&B until the run ends; ends or replaces the process."""
        if self._options.replay:
            self._closing.set()
        Thread(target=self._watch, daemon=True).start()
        try:
            self._feed()
        except ImportError as error:
            self._fail(f"wandb cannot be imported: {error}")
        except Exception as error:  # wandb raises anything; whatever it is, W&B is to be tried once more, offline
            print(redact(traceback.format_exc()), end="", file=sys.stderr)
            self._restart(f"{type(error).__name__}: {error}")
        self._leave()
        self._exit(0)

    def _feed(self) -> None:
        why = self._options.offline
        mode = "offline" if why else self._settings["mode"]
        with self._limit_call("wandb.setup", START_S):
            if mode == "online" and (why := wandb_feed.why_unreachable()):
                mode = "offline"
        with self._limit_call("wandb.init", START_S):
            run = wandb_feed.open_run(self._settings, self._folder, mode, self._options.parent or os.getpid())
        where = os.path.relpath(run.settings.sync_dir, self._folder)
        below = [processes.process_identity(process.pid) for process in processes.descendants(os.getpid())]
        ours = [identity for identity in below if identity is not None]
        self._report("open", mode=mode, why=why, folder=where, url=run.url if mode == "online" else "", processes=ours)
        feed = wandb_feed.WandbFeed(run, self._folder)
        while True:
            closing = self._closing.is_set()  # checked before reading: what the run wrote before its end is then there
            with self._limit_call("wandb.log", CALL_S):
                lines = feed.feed_new_lines()
            if closing and not lines:
                break
            if not lines:
                self._closing.wait(POLL_S)
        with self._limit_call("wandb.finish", math.inf):
            whole = wandb_feed.finish(run, 0 if self._status == "done" or self._options.replay else 1)
        self._report("done", steps=feed.written, whole=whole)

    @contextmanager
    def _limit_call(self, name: str, limit_s: float) -> Iterator[None]:
        self._call = (name, time.monotonic() + limit_s)
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
        """Become a new sink that writes offline; the second time, give up."""
        self._leave()
        if self._options.offline:
            self._give_up(reason)
        processes.kill(processes.descendants(os.getpid()))
        left = max(self._end - time.monotonic(), 1.0) if self._closing.is_set() else self._deadline_s
        options = ["--offline", redact(reason).splitlines()[0][:300], "--status", self._status]
        options += (
            ["--replay"] if self._options.replay else ["--deadline", str(left), "--parent", str(self._options.parent)]
        )
        command = [sys.executable, "-P", "-m", "runner.tracker.wandb_sink", str(self._options.settings)]
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
        os._exit(code)  # a plain exit would wait for wandb's own handlers, up to 10 s where the server is silent

    def _report(self, event: str, **facts: Any) -> None:
        line = json.dumps({"event": event, **facts}) + "\n"
        try:
            os.write(self._options.report, line.encode())
        except OSError as error:  # the reader is gone
            print(f"could not report ({error.strerror}): {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    WandbSink(parse_options(sys.argv[1:])).run()
