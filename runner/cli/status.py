"""`run status`: how far a run is, and how its processes are."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

from runner.cli.args import UsageError
from runner.folder import find
from runner.report.standing import standing
from runner.report.standing_words import lines
from runner.sweep.plan import SweepFolder


def show(args: Namespace) -> int:
    """Print it; with --json, for programs. Changes nothing."""
    if len(args.words) > 1:
        raise UsageError("run status: one run is expected, latest or a folder; for a sweep: run sweep status latest")
    where = args.words[0] if args.words else "latest"
    if SweepFolder(Path(where)).plan.is_file():
        raise UsageError(f"{where} is a sweep: run sweep status {where}; a job of it: run status {where}/000")
    found = standing(find(where))
    print(json.dumps(found.plain(), indent=1) if args.json else "\n".join(lines(found)))
    return 0
