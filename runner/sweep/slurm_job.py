"""What runs inside a Slurm job, on its node: starts one job of a sweep, passes on what it is told, notes how it ended.

sbatch ─▶ exec python -m runner.sweep.slurm_job BATCH ─┬─▶ the job, or, where Slurm starts it again, its going on
                                                       └─▶ jobs/003.note.json: began, lives, ended

SIGUSR1   the sweep: save and end                     SIGTERM   Slurm ends the job: cancelled, preempted, requeued
SIGUSR2   Slurm's time limit is near: save and end, and back into the queue to go on from there
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from runner.device.kinds import KINDS, NPU
from runner.folder import RunFolder
from runner.sweep.note import TOUCH_S, Note, touch
from runner.sweep.order import Order
from runner.sweep.outcome import ENDED_BY_US, Told
from runner.sweep.process import JobProcess
from runner.sweep.slurm_batch import Batch

POLL_S = 0.1
SAVE, LIMIT, ENDED = signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM
CARDS = re.compile(r"GRES=.*?\b{name}(?::\w+)?:\d+\(IDX:([\d,-]+)\)")


def main(path: str) -> int:
    """Run the job of this array index; its exit code, which Slurm then has, too."""
    heard: list[int] = []
    for number in (SAVE, LIMIT, ENDED):
        signal.signal(number, lambda number, _: heard.append(number))
    batch = Batch.read(Path(path))
    order = batch.orders[int(os.environ["SLURM_ARRAY_TASK_ID"])]
    shown = cards(batch)
    note = Note(order.token, socket.gethostname(), os.getpid(), now(), devices_of(batch, shown))
    note.write(Path(order.note))
    code, told = Minder(batch, order, shown, heard).run()
    if heard[:1] == [LIMIT] and code in ENDED_BY_US and (told := requeue(order, note.began)) is None:
        return 0  # Slurm starts it again; the note says that it runs until it then says more
    replace(note, ended=now(), exit_code=code, told=told).write(Path(order.note))
    return code if code >= 0 else 128 - code


class Minder:
    """The job's process and what it is told."""

    def __init__(self, batch: Batch, order: Order, shown: dict[str, str], heard: list[int]) -> None:
        self._batch, self._order, self._heard = batch, order, heard
        begun = int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0 and RunFolder(Path(order.run)).spec.is_file()
        command = order.again if begun else order.command
        self._process = JobProcess(command, Path(order.log), {**order.environment, **shown}, (), order.place)
        self._passed = 0
        self._told: Told | None = None
        self._deadline = float("inf")

    def run(self) -> tuple[int, Told | None]:
        """The job's exit code, and why it was told to stop, where that was not for the sweep to say."""
        began, touched = time.monotonic(), time.monotonic()
        while (code := self._process.poll()) is None:
            self._pass_on()
            seconds, limit = time.monotonic() - began, self._batch.timeout_s
            if limit is not None and seconds > limit and self._deadline == float("inf"):
                self._told = Told(f"not done after {limit:g} s (sweep.timeout_s)", "timeout")
                self._tell(signal.SIGTERM)
            if time.monotonic() > self._deadline:
                self._process.signal(signal.SIGKILL)
            if time.monotonic() - touched > TOUCH_S:
                touched = time.monotonic()
                touch(Path(self._order.note))
            time.sleep(POLL_S)
        return code, self._told

    def _pass_on(self) -> None:
        """Tell the job once, whatever comes how often: a second signal would end it unsaved."""
        heard, self._passed = self._heard[self._passed :], len(self._heard)
        if heard and self._deadline == float("inf"):
            has_it = heard[0] == ENDED and self._batch.all_signalled  # from Slurm itself
            self._tell(0 if has_it else signal.SIGTERM)

    def _tell(self, number: int) -> None:
        self._deadline = time.monotonic() + self._order.grace_s
        if number:
            self._process.signal(number)


def requeue(order: Order, began: float) -> Told | None:
    """Put this job back into Slurm's queue, if it came further since it began; why not, else."""
    metrics = RunFolder(Path(order.run)).metrics
    if not metrics.is_file() or metrics.stat().st_mtime < began:
        return Told("no step was made within the time limit of Slurm", "timeout")
    command = ["scontrol", "requeue", os.environ["SLURM_JOB_ID"]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else Told(f"the time limit of Slurm; {done.stderr.strip()}", "interrupted")


def cards(batch: Batch) -> dict[str, str]:
    """The variable that shows the job its cards, where Slurm does not set it: for NPUs.

    It may be in the environment all the same, from where the sweep was typed.
    """
    kind = KINDS.get(batch.kind)
    if kind is None or kind.visible is None or (kind.visible in os.environ and kind is not NPU):
        return {}
    numbers = handed_out(batch.gres)
    if not numbers:
        seen = os.environ.get(kind.visible, "all of them")
        text = (
            f"Slurm does not tell which cards are this job's (gres.conf has no File= for {batch.gres}): it sees {seen}"
        )
        print(text, flush=True)
        return {}
    return {kind.visible: ",".join(map(str, numbers))}


def handed_out(gres: str) -> list[int]:
    """The numbers of the cards that Slurm has given this job on this node; empty where it does not number them."""
    command = ["scontrol", "show", "job", "--details", os.environ["SLURM_JOB_ID"]]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return numbered(said, gres.partition(":")[0])


def numbered(said: str, name: str) -> list[int]:
    """`… GRES=npu:910b:3(IDX:0-1,5)` → [0, 1, 5]."""
    found = re.search(CARDS.pattern.format(name=re.escape(name)), said)
    numbers: list[int] = []
    for piece in found[1].split(",") if found else ():
        low, _, high = piece.partition("-")
        numbers += range(int(low), int(high or low) + 1)
    return numbers


def devices_of(batch: Batch, shown: dict[str, str]) -> tuple[str, ...]:
    """Where the job runs, for its row in the table: the node, and its cards there."""
    kind, host = KINDS.get(batch.kind), socket.gethostname()
    listed = {**os.environ, **shown}.get(kind.visible or "", "") if kind else ""
    return tuple(f"{host}:{card}" for card in listed.split(",")) if listed else (host,)


def now() -> float:
    """Seconds since the epoch."""
    return datetime.now().timestamp()


def run(arguments: Sequence[str]) -> int:
    """The program."""
    [path] = arguments
    return main(path)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
