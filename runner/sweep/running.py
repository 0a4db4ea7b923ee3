"""The jobs that a sweep follows: how they are told to save and end, and killed where they do not."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass

from runner.sweep.config import SweepConfig
from runner.sweep.outcome import Told
from runner.sweep.site import Handle, Say
from runner.sweep.watch import Watch

POLL_S = 0.05
KILLED_S = 30.0  # for a site to confirm that a killed job is gone


@dataclass(slots=True)
class Running:
    """A job that a site has taken.

    since: when it was first seen to run (monotonic seconds); None while it waits for room there
    told: what it was told, if anything; deadline: when it is killed for not having ended then (monotonic seconds)
    """

    handle: Handle
    watch: Watch
    since: float | None = None
    told: Told | None = None
    deadline: float = float("inf")

    @property
    def devices(self) -> tuple[str, ...]:
        """What it runs on."""
        return self.handle.devices

    @property
    def seconds(self) -> float:
        """For how long it has run; 0 while it waits for room."""
        return self.handle.seconds or 0.0

    @property
    def pace(self) -> float:
        """Steps per second, of those that were watched."""
        return 0.0 if self.since is None else self.watch.made / max(time.monotonic() - self.since, 1e-3)


class Followed(dict[int, Running]):
    """The jobs that a sweep follows, by their numbers."""

    def __init__(self, options: SweepConfig, say: Say) -> None:
        super().__init__()
        self._options, self._say = options, say

    def tell(self, index: int, told: Told, number: int) -> None:
        """Tell a job to save and end, once."""
        job = self[index]
        if job.told is None:
            job.told, job.deadline = told, time.monotonic() + self._options.grace_s
            job.handle.signal(number)

    def tell_all(self, why: str, number: int, again: bool) -> None:
        """Tell all to save and end, and say so; `again`: Ctrl-C has been pressed before."""
        if self:
            jobs = f"{len(self)} job{'s' if len(self) > 1 else ''}"
            within = f"within {self._options.grace_s:.0f} s (Ctrl-C{' again' if again else ''} kills them)"
            self._say(f"{why}: {jobs} told to save and end, {within}")
        for index in self:
            self.tell(index, Told(why), number)

    def kill(self) -> None:
        """Kill all."""
        for job in self.values():
            job.handle.signal(signal.SIGKILL)

    def expire(self) -> None:
        """Stop jobs that take too long, and kill those that were told to stop and did not."""
        limit = self._options.timeout_s
        for index, job in self.items():
            if limit is not None and job.told is None and job.seconds > limit:
                why = f"not done after {limit:g} s (sweep.timeout_s)"
                self.tell(index, Told(why, "timeout"), signal.SIGTERM)
            elif time.monotonic() > job.deadline:
                job.deadline = float("inf")
                self._say(f"job {index}  did not end within {self._options.grace_s:g} s: killed")
                job.handle.signal(signal.SIGKILL)

    def end(self) -> None:
        """No job outlives an error that ends the sweep: those that run save first, if they can in time."""
        for job in self.values():
            job.handle.signal(signal.SIGTERM)
        self._wait(self._options.grace_s)
        self.kill()
        for index in self._wait(KILLED_S):
            self._say(f"job {index}  may still run: nothing was heard of its end within {KILLED_S:g} s")

    def _wait(self, seconds: float) -> list[int]:
        """Wait until all have ended, at most so long; those that have not."""
        end = time.monotonic() + seconds
        while (left := [i for i, job in self.items() if job.handle.poll() is None]) and time.monotonic() < end:
            time.sleep(POLL_S)
        return left
