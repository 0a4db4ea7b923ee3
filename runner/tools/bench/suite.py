"""Runs the cases of `run bench`; torch is imported on the way, not before.

specs ─▶ environment ─▶ torch ─▶ the device itself ─▶ each case: job, baseline ─▶ BenchResult
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.core.auto_choices import Decisions
from runner.core.errors import DataError, Problem, SpecError
from runner.launch.local import ready
from runner.launch.session import load_torch, set_environment
from runner.launch.words import on_screen
from runner.spec.job import JobSpec
from runner.tools.bench.cases import Case

if TYPE_CHECKING:
    from runner.tools.bench.report import BenchResult

FORMAT = 1  # of the JSON; grows when a field changes its meaning or goes
STEPS = {True: 3, False: 6}  # of a case, by whether it is at toy size; the first one does not count


def read_earlier(path: Path) -> dict[str, Any]:
    """The JSON of an earlier bench. Raises DataError for a file that is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"--compare {path}: {error}; a file that run bench wrote is expected") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT or "cases" not in found:
        raise DataError(f"--compare {path}: expected what run bench writes, in format {FORMAT}")
    return found


def bench(
    jobs: Sequence[tuple[Case, JobSpec, Path]], say: Callable[[str], None], save: Callable[[BenchResult], None]
) -> BenchResult:
    """Measure the device, and every case with its job's spec and the folder for its files; `say` gets the table, a line
    as soon as it is known, and `save` after each case all results so far. Raises SpecError for jobs of several
    processes."""
    first = jobs[0][1]
    if first.launch.world > 1:
        text = f"run bench is one process, and this job is {first.launch.world}"
        raise SpecError([Problem("launch.devices", f"{text}; type launch.devices=1 parallelism=single")])
    first.device.preflight()
    with on_screen(jobs[0][2] / "run.log", silent=True):
        decide = Decisions(first.strict)
        set_environment(first, decide)
        load_torch(first.device.name)
        from runner.build import build_device
        from runner.tools.bench.measure import measure, measure_device  # torch is imported here
        from runner.tools.bench.report import BenchResult, format_header, format_row

        device = build_device(first, decide)
        machine = measure_device(first, device, decide)
        say("\n".join(format_header(machine)))
        found = []
        for case, spec, folder in jobs:
            case.write(folder)
            found.append(measure(case.name, ready(spec), folder, device, decide))
            say(format_row(found[-1]))
            result = BenchResult(machine, tuple(found), decide.records())
            save(result)
        for decision in decide.made:
            if not decision.is_fact:
                say(f"decided  {decision}")
        return result
