"""`run bench`: speed of this device, and of jobs on it beside baselines. Imports torch."""

from __future__ import annotations

import json
from argparse import Namespace
from datetime import datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from runner.cli.job_builder import compose_job
from runner.core.device_kinds import CPU
from runner.core.errors import EnvironmentProblem
from runner.run_dir.folder import display_path
from runner.tools.bench.suite import STEPS, cases, read_earlier, run_bench
from runner.tracker.text import print_text

if TYPE_CHECKING:
    from runner.tools.bench.report import BenchResult


def run(args: Namespace) -> int:
    """Measure, print the table, write the JSON; returns 0. Raises ParityError below --min-mfu."""
    device = compose_job([word for word in args.words if word.startswith("device")]).spec.device
    toy = device.kind is CPU or device.simulator(1) is not None
    out = args.out or Path(f"bench-{datetime.now():%Y%m%d-%H%M%S}.json")
    if out.is_dir() or not out.parent.is_dir():
        raise EnvironmentProblem(f"--out {out}: expected a file in an existing folder")
    earlier = read_earlier(args.compare) if args.compare else None
    with TemporaryDirectory(prefix="run-bench-") as name:
        jobs = []
        for number, case in enumerate(cases(toy)):
            folder = Path(name) / str(number)
            folder.mkdir()
            jobs.append((case, compose_job([*case.job(folder, STEPS[toy]), *args.words]).spec, folder))
        result = run_bench(jobs, partial(print, flush=True), partial(_write, out))
    from runner.tools.bench import report  # torch is there by now

    if earlier is not None:
        print_text("\n" + "\n".join(report.format_comparison(result, earlier)))
    print_text(f"\nwritten  {display_path(out)}")
    if args.min_mfu is not None:
        report.check_min_mfu(result, args.min_mfu)
    return 0


def _write(path: Path, result: BenchResult) -> None:
    """Write the results so far: an error in a later case loses none of them."""
    path.write_text(json.dumps(result.as_json(), indent=1) + "\n", encoding="utf-8")
