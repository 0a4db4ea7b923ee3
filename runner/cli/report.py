"""`run report`: a run's numbers as one HTML page; `run diff`: what differs between two runs;
`run status`: how far a run is, and how its processes are.
"""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

from runner.cli.args import UsageError
from runner.run_dir.folder import find, shown
from runner.sweep.plan import SweepFolder
from runner.tools.report import diff as differ
from runner.tools.report.page import write_page
from runner.tools.report.standing import lines, standing


def report(args: Namespace) -> int:
    """Write report.html of a run."""
    if len(args.words) > 1:
        raise UsageError("run report: one run is expected, latest or a folder; for a sweep: run sweep report latest")
    where = args.words[0] if args.words else "latest"
    if SweepFolder(Path(where)).plan.is_file():
        raise UsageError(f"{where} is a sweep: run sweep report {where}; a job of it: run report {where}/000")
    folder = find(where)
    path = args.out or folder.report
    write_page(folder, path)
    print(shown(path))
    return 0


def diff(args: Namespace) -> int:
    """Print what differs between two runs; with --out, also write it as a page with the curves of both."""
    if len(args.words) != 2:
        raise UsageError("run diff: two runs are expected, e.g. run diff outputs/2026-11-21/101500-a-3f2a latest")
    first, second = (find(where) for where in args.words)
    print("\n".join(differ.lines(first, second)))
    if args.out:
        differ.write_page(first, second, args.out)
        print(f"\npage     {shown(args.out)}")
    return 0


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
