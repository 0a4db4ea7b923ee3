"""Jobs on a Slurm cluster: job arrays, which go on without their sweep.

start, start, … ─▶ one batch ─▶ first poll: one array, sweep.parallel of it at once ─▶ notes, squeue ─▶ exit codes
take_up ─▶ the jobs of the sweep before that wait, run, or have said how they ended
An array that is submitted while another one is alive begins when that one has ended, so that no more run at once.
"""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from runner.errors import EnvironmentProblem
from runner.slurm.commands import USUAL, signals_all
from runner.sweep.config import SweepConfig
from runner.sweep.need import Need
from runner.sweep.order import Order
from runner.sweep.site import Handle, Identity, Say
from runner.sweep.slurm import queue, submission
from runner.sweep.slurm.batch import FOLDER, Batch, keep_id, kept_id
from runner.sweep.slurm.handle import SlurmJob
from runner.sweep.slurm.job import SAVE
from runner.sweep.slurm.queue import Entry

ASK_S = (0.3, 10.0)  # between two questions to Slurm, in the beginning and later
SLOWING = 30.0  # the time between them is this part of the time since the beginning


@contextmanager
def opened(options: SweepConfig) -> Iterator[Slurm]:
    """The cluster that `sbatch` submits to from here. Raises EnvironmentProblem where there is none."""
    yield Slurm(options, signals_all())


class Slurm:
    """The jobs of one sweep on the cluster. all_signalled: whether its SIGTERM reaches all processes of a job."""

    def __init__(self, options: SweepConfig, all_signalled: bool) -> None:
        self._options, self._all_signalled = options, all_signalled
        self._needs: list[Need] = []
        self._open: dict[Need, Batch] = {}  # not submitted yet
        self._jobs: list[SlurmJob] = []  # that have not ended
        self._arrays: dict[str, str] = {}  # token of a batch → number of its array
        self._queue: queue.Queue = {}
        self.answers = 0  # of Slurm, so far
        self._began, self._ask_at = time.monotonic(), float("-inf")
        self._folder = Path()  # of the sweep, whose name is that of its jobs in Slurm
        self._say: Say | None = None
        self._said: set[str] = set()

    @property
    def cards(self) -> None:
        """Known on the nodes only."""
        return None

    @property
    def parallel(self) -> int:
        return min(self._options.parallel or len(self._needs), len(self._needs))

    def admit(self, needs: Iterable[Need]) -> None:
        self._needs = list(needs)
        for need in dict.fromkeys(self._needs):
            submission.try_out(self._options, need, len(self._needs))

    def describe(self) -> str:
        each = ", ".join(dict.fromkeys(str(need) for need in self._needs))
        where = f"Slurm, partition {self._options.partition}" if self._options.partition else "Slurm"
        limit = self._options.parallel
        return f"{each} each, on {where}; " + ("as many at once as it lets" if limit is None else f"{limit} at once")

    def has_room(self, need: Need) -> bool:
        """Slurm itself holds back the jobs of a grid; those of a search are not even chosen before."""
        return self._options.search is None or len(self._jobs) < self.parallel

    def start(self, need: Need, order: Order) -> SlurmJob:
        self._folder = Path(order.note).parents[1]
        if need not in self._open:
            gres, limit = submission.gres_of(self._options, need), self._options.timeout_s
            self._open[need] = Batch(secrets.token_hex(4), need.kind, gres, limit, self._all_signalled)
        batch = self._open[need]
        batch.orders[order.index] = order
        return self._follow(batch.token, order.index, order.token, order.note)

    def take_up(self, left: Mapping[int, Identity], grace_s: float, say: Say) -> Mapping[int, Handle]:
        self._say, found = say, {}
        submitted = {index: known for index, known in left.items() if "batch" in known}
        for known in list(submitted.values())[:1]:
            self._folder = Path(known["note"]).parents[1]
            self._queue = queue.queue(self._folder.name)
        for index, known in submitted.items():
            if (array := self._number(known["batch"])) is not None:
                self._arrays[known["batch"]] = array
                job = self._follow(known["batch"], index, known["token"], known["note"])
                if job.is_known:
                    found[index] = job
                else:
                    self._jobs.remove(job)
        if alive := [str(index) for index, job in found.items() if job.is_alive]:
            say(f"Slurm still has job {', '.join(alive)} of the sweep before: they go on")
        return found

    def entry(self, batch: str, index: int) -> Entry | None:
        """What Slurm says of a job; None where it does not know it (any more)."""
        return self._queue.get((self._arrays.get(batch, ""), index))

    def is_submitted(self, batch: str) -> bool:
        """Whether Slurm has been given the job of this batch."""
        return batch in self._arrays

    def turn(self) -> None:
        """Submit what was started, pass on what was signalled, ask Slurm when it is time to.

        Raises EnvironmentProblem where Slurm refuses the jobs.
        """
        self._submit()
        self._pass_on()
        if time.monotonic() < self._ask_at or not self._arrays:
            return
        self._ask_at = time.monotonic() + min(max((time.monotonic() - self._began) / SLOWING, ASK_S[0]), ASK_S[1])
        try:
            self._queue = queue.queue(self._folder.name)
        except EnvironmentProblem as error:
            self._tell(f"{error}; asking again")
            return
        self.answers += 1
        self._tell_of_waiting()

    def ended(self, job: SlurmJob) -> None:
        """Follow a job no longer."""
        self._jobs.remove(job)

    def _follow(self, batch: str, index: int, token: str, note: str) -> SlurmJob:
        self._jobs.append(SlurmJob(self, batch, index, token, Path(note)))
        return self._jobs[-1]

    def _number(self, batch: str) -> str | None:
        """The number of a batch's array: written down, or, where its sweep died before that, found by its token."""
        numbers = (array for (array, _), entry in self._queue.items() if entry.comment == batch)
        return kept_id(self._folder / FOLDER, batch) or next(numbers, None)

    def _submit(self) -> None:
        while self._open:
            need, batch = self._open.popitem()
            own = [job for job in self._jobs if job.batch == batch.token and job.is_alive]
            indices = [job.index for job in own]
            if not indices:
                continue  # all were withdrawn before it came to that
            try:
                path, after = batch.write(self._folder / FOLDER), self._before()
                array = submission.submit(self._options, need, path, self._folder.name, indices, after)
            except EnvironmentProblem:
                for job in own:
                    job.withdraw(signal.SIGTERM)
                raise
            keep_id(self._folder / FOLDER, batch.token, array)
            self._arrays[batch.token] = array
            self._ask_at = time.monotonic()

    def _before(self) -> list[str]:
        """The arrays that must end first, so that no more than sweep.parallel jobs run at once."""
        if self._options.parallel is None or self._options.search is not None:
            return []  # no limit; or it is kept by `has_room`
        alive = dict.fromkeys(self._arrays[job.batch] for job in self._jobs if job.batch in self._arrays)
        return list(alive)

    def _pass_on(self) -> None:
        told = [(job, number) for job in self._jobs if (number := job.take_signal()) is not None]
        if not told:
            return
        self._ask_at = time.monotonic()
        kill = [self._name(job) for job, number in told if number == signal.SIGKILL]
        save = [self._name(job) for job, number in told if number != signal.SIGKILL]
        try:
            if kill:
                queue.cancel(kill)
            if save:
                queue.save_and_end(save, SAVE)
        except EnvironmentProblem as error:
            self._tell(f"{error}; what does not end within sweep.grace_s is cancelled then")

    def _name(self, job: SlurmJob) -> str:
        return f"{self._arrays[job.batch]}_{job.index}"

    def _tell_of_waiting(self) -> None:
        """Say why jobs wait, where it is not for their turn: such jobs may wait for ever."""
        for job in self._jobs:
            entry = self.entry(job.batch, job.index)
            if entry is not None and entry.state == "PENDING" and entry.reason not in USUAL:
                self._tell(f"job {job.index} waits in Slurm: {entry.reason}")

    def _tell(self, text: str) -> None:
        if self._say is not None and text not in self._said:
            self._said.add(text)
            self._say(text)
