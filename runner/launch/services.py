"""The samplers of a job, which serve its ranks: one that is lost is started anew, so many times; then the job ends.

start ─▶ ended, killed, silent ─▶ a line that says so ─▶ the same again, what it was asked is asked of it again
                               └▶ too often, or it is the job that is wrong ─▶ failed: why the job ends
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from runner.folder import RunFolder, shown
from runner.launch import hang
from runner.launch.member import Order, Process, Starter
from runner.launch.verdict import KILLED, LASTING, LOST, OWN, Verdict, judge
from runner.spec.job import JobSpec

SILENT = 1 / 3  # of sampler.timeout_s at most: then there is time left to start another one, and for that one to answer
SILENT_S = 300.0  # at most: as long as a library may be read from a slow disk, when no other thread can speak
REPLACEMENTS = 3  # where launch.replacements says nothing
NOTES = "*.json"  # in the folders of their logs: where each is reached


@dataclass(slots=True)
class Services:
    """Those of one attempt, none where the ranks do it all. `failed`: why the job cannot go on without one of them."""

    spec: JobSpec
    folder: RunFolder
    attempt: int
    starter: Starter
    environment: Mapping[str, str]  # of each
    say: Callable[[str, str], None]
    members: list[Process] = field(default_factory=list)
    lost: dict[int, int] = field(default_factory=dict)  # how often, by place in `members`
    failed: Verdict | None = None

    @property
    def replaced(self) -> dict[str, int]:
        """How often each was started anew, by name."""
        return {self.members[at].order.name: times for at, times in self.lost.items()}

    def start(self) -> None:
        """Start all. Raises StorageError, EnvironmentProblem."""
        orders = list(self._samplers())
        for place in {order.folder.log.parent for order in orders}:
            place.mkdir(exist_ok=True)
            for note in place.glob(NOTES):
                note.unlink()  # of a process that a killed launcher had
        for order in orders:
            self.members.append(self.starter.start(order))

    def look(self) -> None:
        """Take in what has happened, and start anew what is lost. Raises StorageError, EnvironmentProblem."""
        for at, member in enumerate(self.members):
            if self.failed is None and (verdict := self._lost(member)) is not None:
                self._replace(at, verdict)

    def stop(self) -> None:
        """Tell those that still run to end."""
        for member in self.members:
            if member.runs():
                member.signal(signal.SIGTERM)

    def run(self) -> bool:
        """Whether one still does."""
        return any([member.runs() for member in self.members])  # all are looked at

    def end(self) -> None:
        """End those that still run."""
        for member in self.members:
            member.kill()
        for member in self.members:
            member.ended()

    def _samplers(self) -> Iterator[Order]:
        each = self.spec.sampler.cards()
        for index in range(count_of(self.spec)):
            first = self.spec.launch.devices + index * each
            yield Order(
                role="sampler",
                index=index,
                folder=self.folder.of_sampler(index),
                attempt=self.attempt,
                cards=tuple(range(first, first + each)),
                environment=self.environment,
            )

    def _lost(self, member: Process) -> Verdict | None:
        """Why it is lost, None if it is not."""
        if not member.runs():
            ended = member.ended()
            text = f"{member.order.name} ended, and nobody told it to; see {ended.log}"
            return judge([ended]) or Verdict(OWN, text, LOST)
        member.ear.listen()
        limit = silence_s(self.spec)
        if time.monotonic() - member.ear.heard <= limit:
            return None
        [where] = hang.dump([member], [member])
        member.kill()
        member.ended()
        return Verdict(KILLED, f"{where}, and has said nothing for {limit:g} s", LOST)

    def _replace(self, at: int, verdict: Verdict) -> None:
        """Start another one in its place, unless it was the last time."""
        given = self.spec.launch.replacements
        most, times = REPLACEMENTS if given is None else given, self.lost.get(at, 0)
        order = self.members[at].order
        if verdict.exit_code in LASTING:
            self.failed = verdict
        elif times >= most:
            again = f"it was started anew {times} times, and launch.replacements={most}"
            self.failed = verdict._replace(
                message=f"{verdict.message}\n  {again}; what it said: {shown(order.folder.log)}"
            )
        else:
            self.lost[at] = times + 1
            first, *_ = verdict.message.splitlines()
            self.say(f"{first}; it is started anew ({times + 1} of {most}), and asked again", "warning")
            self.members[at] = self.starter.start(order)


def count_of(spec: JobSpec) -> int:
    """How many processes launch.samplers devices are for."""
    return spec.launch.samplers // spec.sampler.cards()


def silence_s(spec: JobSpec) -> float:
    """Seconds without a word after which a sampler is taken for lost."""
    return min(SILENT_S, SILENT * spec.sampler.patience_s)
