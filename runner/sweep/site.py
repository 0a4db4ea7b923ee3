"""The seam between a sweep and where its jobs run: this machine, a Ray cluster, Slurm. The engine knows nothing else.

a new job ─▶ Site.has_room ─▶ token, note in state.json ─▶ Site.start(need, order) ─▶ Handle: poll, signal
a resume  ─▶ identities from state.json ─▶ Site.take_up ─▶ Handles of the jobs that went on without their sweep
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from runner.errors import EnvironmentProblem
from runner.sweep.need import Need
from runner.sweep.order import Order
from runner.sweep.outcome import Told

# JSON, with which a site finds a job again that it has started. `on` (which site) and the order's `token` and `note`
# are always in it: they are on the disk before a job is started; what the handle adds, after that.
Identity = Mapping[str, Any]
Say = Callable[[str], None]  # a line for the user and for sweep.log


class Handle(Protocol):
    """An attempt of a job that a site has taken. None of its methods blocks."""

    @property
    def identity(self) -> Identity:
        """With which `take_up` finds it again."""
        ...

    @property
    def seconds(self) -> float | None:
        """For how long its process has run, or ran; None while it waits for room."""
        ...

    @property
    def devices(self) -> tuple[str, ...]:
        """What it runs on; empty as long as that is not known."""
        ...

    @property
    def told(self) -> Told | None:
        """Once it has ended: what is known there of why, and its exit code does not say."""
        ...

    def poll(self) -> int | None:
        """The exit code (negative: the signal that killed it), None while it waits or runs.

        Once there is one, nothing of the job is left running, and its devices are free again.
        """
        ...

    def signal(self, number: int) -> None:
        """Pass SIGINT or SIGTERM (save and end), or SIGKILL, on to it; one that waits for room is withdrawn."""
        ...


class Site(Protocol):
    """Where jobs run."""

    @property
    def cards(self) -> tuple[str, ...] | None:
        """The kinds of card there, for device=auto: `npu`, `cuda`; None where that is known on the nodes only."""
        ...

    @property
    def parallel(self) -> int:
        """Jobs at once, at most; known after `admit`."""
        ...

    def admit(self, needs: Iterable[Need]) -> None:
        """Take in what the jobs will occupy. Raises SpecError or EnvironmentProblem where one can never start."""
        ...

    def describe(self) -> str:
        """What each job gets of what is there: `1 core each, of 2; 2 jobs at once`."""
        ...

    def has_room(self, need: Need) -> bool:
        """Whether a job may be started now."""
        ...

    def start(self, need: Need, order: Order) -> Handle:
        """Start a job, where there is room. Raises StorageError where it cannot be started at all."""
        ...

    def take_up(self, left: Mapping[int, Identity], grace_s: float, say: Say) -> Mapping[int, Handle]:
        """Jobs that the sweep before left behind, by their numbers: handles of those that go on or have said how they
        ended. All others have ended when this returns; nothing is known of how. Called once, before the first `start`.
        """
        ...


def refuse_elsewhere(left: Mapping[int, Identity], on: str) -> None:
    """Raise EnvironmentProblem for jobs that another kind of site was given: only that one knows whether they still
    run, and a job must not run twice."""
    for place in dict.fromkeys(identity["on"] for identity in left.values() if identity.get("on", on) != on):
        jobs = [str(index) for index, identity in left.items() if identity.get("on") == place]
        which = f"job{'s' if len(jobs) > 1 else ''} {', '.join(jobs)}"
        text = f"{which} may still run where sweep.on={place} had put them; go on with sweep.on={place} first"
        raise EnvironmentProblem(text)
