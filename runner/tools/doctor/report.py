"""What a check returns; the report: findings, steps in order, ready devices; or all as JSON."""

from __future__ import annotations

import json
import os
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from itertools import groupby
from typing import TextIO

from runner.tracker.text import count_noun

ANY_DEVICE = "any device"  # the group of checks that every device needs


class CheckStatus(StrEnum):
    """ok; warning = works, with a remark; problem = cannot work; unknown; skipped; bug = of this project."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    UNKNOWN = "unknown"
    SKIPPED = "skipped"
    BUG = "bug"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The answer of one check: what was seen, and what to type where something is to be done."""

    verdict: CheckStatus
    evidence: str
    remedy: str | None = None


@dataclass(frozen=True, slots=True)
class ReportEntry:
    """A finding in the report: which check of which group made it."""

    group: str
    check: str
    finding: CheckResult

    def record(self) -> dict[str, str | None]:
        """As plain data."""
        return {"group": self.group, "check": self.check, **asdict(self.finding)}


ok = partial(CheckResult, CheckStatus.OK)  # nothing to do
skip = partial(CheckResult, CheckStatus.SKIPPED)  # does not apply here
warning = partial(CheckResult, CheckStatus.WARNING)  # it works, and something is to be known
unknown = partial(CheckResult, CheckStatus.UNKNOWN)  # not established: the tables or the machine do not say


def problem(evidence: str, remedy: str) -> CheckResult:
    """It cannot work until the remedy is done."""
    return CheckResult(CheckStatus.PROBLEM, evidence, remedy)


def wait_or_choose(variable: str, free: Sequence[str]) -> str:
    """What to do where others use devices: wait, or name the free ones in a variable."""
    return "wait, or stop them" + (f"; or use the free ones: export {variable}={','.join(free)}" if free else "")


FORMAT = 1  # of --json; grows when a field changes its meaning or goes
COLORS = {
    CheckStatus.OK: 32,
    CheckStatus.WARNING: 33,
    CheckStatus.PROBLEM: 31,
    CheckStatus.BUG: 31,
    CheckStatus.UNKNOWN: 36,
    CheckStatus.SKIPPED: 2,
}
NAME_WIDTH, VERDICT_WIDTH = 17, 7
COMMON = ("machine", ANY_DEVICE)


def print_report(entries: Iterable[ReportEntry], devices: Sequence[str], out: TextIO) -> list[ReportEntry]:
    """Print each entry when it comes, then the end of the report; returns them all."""
    colored = out.isatty() and "NO_COLOR" not in os.environ
    seen: list[ReportEntry] = []
    for group, members in groupby(entries, lambda entry: entry.group):
        print(f"{chr(10) if seen else ''}{group}", file=out)
        left_out: list[ReportEntry] = []
        for entry in members:
            if entry.finding.verdict is CheckStatus.SKIPPED:
                left_out.append(entry)
            else:
                print("\n".join(_lines(entry, colored)), file=out, flush=True)
            seen.append(entry)
        if left_out:
            print("\n".join(_lines(_merge_skipped(left_out), colored)), file=out, flush=True)
    print("\n".join(["", *_ending(seen, devices)]), file=out)
    return seen


def _merge_skipped(entries: Sequence[ReportEntry]) -> ReportEntry:
    """What was left out in one group, as one entry: a line of names for each reason."""
    reasons: dict[str, list[str]] = {}
    for entry in entries:
        reasons.setdefault(entry.finding.evidence, []).append(entry.check)
    lines = [": ".join(filter(None, [", ".join(names), reason])) for reason, names in reasons.items()]
    return ReportEntry(entries[0].group, "left out" if entries[0].check else "", skip("\n".join(lines)))


def as_json(entries: Sequence[ReportEntry], devices: Sequence[str]) -> str:
    """The whole report for programs."""
    report = {
        "format": FORMAT,
        "exit_code": exit_code(entries),
        "ready": {device: state is None for device, state in readiness(entries, devices).items()},
        "findings": [entry.record() for entry in entries],
        "todo": [line for _, line in steps(entries)],
    }
    return json.dumps(report, indent=1, ensure_ascii=False)


def exit_code(entries: Sequence[ReportEntry]) -> int:
    """1 where a check of ours failed, 2 where something cannot work, else 0."""
    verdicts = {entry.finding.verdict for entry in entries}
    return 1 if CheckStatus.BUG in verdicts else 2 if CheckStatus.PROBLEM in verdicts else 0


def steps(entries: Iterable[ReportEntry]) -> list[tuple[str, str]]:
    """Each problem and the line that fixes it, in order; problems with the same line are one step."""
    found: dict[str, list[str]] = {}
    for entry in entries:
        if entry.finding.verdict is CheckStatus.PROBLEM and entry.finding.remedy is not None:
            found.setdefault(entry.finding.remedy, []).append(entry.finding.evidence)
    return [("; ".join(dict.fromkeys(what)), line) for line, what in found.items()]


def numbered_steps(entries: Iterable[ReportEntry]) -> Iterator[str]:
    """The steps as a user reads them: what is wrong, and below it the line alone."""
    for number, (what, line) in enumerate(steps(entries), 1):
        yield f"  {number}. {what}"
        yield f"     {line}"


def readiness(entries: Sequence[ReportEntry], devices: Sequence[str]) -> dict[str, str | None]:
    """Device → what stands against it, None where it was tried and nothing does."""
    return {device: _why_not_ready(entries, device) for device in devices}


def _why_not_ready(entries: Sequence[ReportEntry], device: str) -> str | None:
    mine = [entry.finding.verdict for entry in entries if entry.group in (*COMMON, device, f"trial on {device}")]
    problems = sum(verdict in (CheckStatus.PROBLEM, CheckStatus.BUG) for verdict in mine)
    if problems:
        return f"not ready: {count_noun(problems, 'problem')}"
    tried = any(e.group == f"trial on {device}" and e.finding.verdict is CheckStatus.OK for e in entries)
    return None if tried else "no problem found, but not tested"


def _lines(entry: ReportEntry, colored: bool) -> list[str]:
    verdict = entry.finding.verdict
    mark = ("-" if verdict is CheckStatus.SKIPPED else verdict.value).ljust(VERDICT_WIDTH)
    text = _wrap(entry.finding.evidence)
    painted = f"\033[{COLORS[verdict]}m{mark}\033[0m" if colored else mark
    return [f"  {painted}  {entry.check.ljust(NAME_WIDTH)}  {text[0]}".rstrip(), *text[1:]]


def _wrap(text: str) -> list[str]:
    """A text in its column; the lines after the first are indented to it."""
    indent = " " * (2 + VERDICT_WIDTH + 2 + NAME_WIDTH + 2)
    width = max(shutil.get_terminal_size((120, 24)).columns - len(indent), 40)
    lines = [
        line
        for part in text.splitlines() or [""]
        for line in textwrap.wrap(part, width, break_long_words=False, break_on_hyphens=False) or [""]
    ]
    return [lines[0], *(f"{indent}{line}" for line in lines[1:])]


def _ending(entries: Sequence[ReportEntry], devices: Sequence[str]) -> Iterator[str]:
    found = (entry.finding for entry in entries if entry.finding.verdict is CheckStatus.WARNING)
    look = dict.fromkeys(finding.remedy for finding in found if finding.remedy is not None)
    if fixes := list(numbered_steps(entries)):
        yield "do this, in order"
        yield from (*fixes, "")
    if look:
        yield "check these"
        yield from (f"  {line}" for line in look)
        yield ""
    for device, state in readiness(entries, devices).items():
        yield f"{device.ljust(4)}  {state or 'ready'}"
