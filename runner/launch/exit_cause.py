"""Why a job of several processes ended: the cause among their reports.

killed by a signal ▸ an error of its own ▸ lagging behind the others ▸ interrupted ▸ waited for another rank
"""

from __future__ import annotations

import math
import re
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from runner.core.errors import DeadlineExceeded, Interrupted, RunnerError
from runner.core.rank_info import RankInfo
from runner.core.signals import signal_name
from runner.launch.heartbeat import ExitReport

NAMED = re.compile(r"(?:rank|sampler) \d+\b")  # begins a message that names its process: it is passed on
LOST = 75  # exit code of a job that lost a process or a machine
LASTING = (2, 3, 4, 5, 7, 8)  # exit codes of errors of the job, its data or its disk: they would occur again
KILLED, OWN, LAGGED, INTERRUPTED, WAITED = range(5)  # the first one explains the end of a job best
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
HINTS: dict[int, str] = {
    signal.SIGKILL: "out of host memory (see dmesg), or killed by a user or a batch system",
    signal.SIGABRT: "a library aborted; its last output is in {log}",
    **dict.fromkeys(CRASHES, "a library crashed; the stacks are in {log}"),
}
ONLY = str(RankInfo())  # the name of the only rank, which messages need not repeat


class ExitCause(NamedTuple):
    """Why the ranks of a machine ended; strength: KILLED … WAITED, the least explains best."""

    strength: int
    message: str
    exit_code: int

    def to_error(self, stopped: bool = False) -> RunnerError:
        """The error of the command. stopped: a signal requested the end."""
        if self.strength == INTERRUPTED:
            return Interrupted(self.exit_code - 128, self.message)
        return JobFailed(self.message, self.exit_code, stopped)


class JobFailed(RunnerError):
    """The error of one of its processes, with its exit code. `stopped`: a signal had requested its end."""

    def __init__(self, message: str, exit_code: int, stopped: bool = False) -> None:
        super().__init__(message, exit_code)
        self.stopped = stopped


def is_final(error: RunnerError) -> bool:
    """Whether no other attempt is made: it would end the same way, or was stopped on purpose."""
    return error.exit_code in (RunnerError.exit_code, *LASTING) or (isinstance(error, JobFailed) and error.stopped)


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """A process that has ended.

    code: the return code, negative for a signal; ours: the supervisor killed it, which explains nothing; lost: what is
    known of a process whose connection is lost
    """

    name: str  # rank 2 of 4
    code: int
    report: ExitReport | None
    log: str
    ours: bool = False
    lost: str = ""


def find_cause(ranks: Sequence[ProcessExit], passed_on: Sequence[int] = ()) -> ExitCause | None:
    """The cause of the end of one machine's ranks, None if all ended well.

    passed_on: the signals that the launcher passed on to them
    """
    reports = Counter(rank.report.message for rank in ranks if rank.report)
    # An end explains nothing if the supervisor killed the rank, or it ended because of another.
    failed = [rank for rank in ranks if rank.code != 0 and (not rank.ours or rank.report is not None or passed_on)]
    failed.sort(key=lambda rank: rank.report.when if rank.report else math.inf)
    return min((_cause_of(rank, passed_on, reports) for rank in failed), key=lambda found: found.strength, default=None)


def hang_cause(names: Sequence[str], waited_s: float, details: Sequence[str]) -> ExitCause:
    """The cause where ranks did not respond to the others."""
    do = "does" if len(names) == 1 else "do"
    text = "\n  ".join([f"{', '.join(names)} {do} not respond; the others waited {waited_s:g} s", *details])
    return ExitCause(LAGGED, text, DeadlineExceeded.exit_code)


def _cause_of(rank: ProcessExit, passed_on: Sequence[int], reports: Mapping[str, int]) -> ExitCause:
    """Why one rank ended; `reports` counts the ranks with the same report, whose cause is then shared."""
    if (report := rank.report) is not None:
        strength = {"error": OWN, "interrupted": INTERRUPTED, "waited": WAITED}[report.kind]
        known = rank.name == ONLY or reports[report.message] > 1 or NAMED.match(report.message) is not None
        named = strength == INTERRUPTED or known
        return ExitCause(strength, report.message if named else f"{rank.name}: {report.message}", report.exit_code)
    if passed_on and (rank.ours or rank.code in {code for n in passed_on for code in (-n, 128 + n)}):
        return ExitCause(INTERRUPTED, f"{signal_name(passed_on[0])}: stopped immediately", 128 + passed_on[0])
    if rank.code < 0:
        hint = f"\n  {HINTS[-rank.code].format(log=rank.log)}" if -rank.code in HINTS else ""
        how = f"was lost: {rank.lost}" if rank.lost else f"was killed ({signal_name(-rank.code)}){hint}"
        return ExitCause(KILLED, f"{rank.name} {how}", LOST)
    return ExitCause(OWN, f"{rank.name} exited with code {rank.code} and no message; see {rank.log}", rank.code)
