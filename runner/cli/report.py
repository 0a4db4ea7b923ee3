"""`run report`: a run's numbers as one HTML page; `run diff`: what differs between two runs;
`run status`: how far a run is, and how its processes are.
"""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

from runner.cli.args import UsageError
from runner.run_dir.folder import RunFolder, display_path, find_run
from runner.sweep.plan import SweepFolder
from runner.tools.report import diff as differ
from runner.tools.report.page import write_page
from runner.tools.report.run_status import read_run_status, status_lines
from runner.tracker.text import print_text


def report(args: Namespace) -> int:
    """Write report.html of a run."""
    folder = _find_run(args)
    path = args.out or folder.report
    write_page(folder, path)
    print_text(display_path(path))
    return 0


def diff(args: Namespace) -> int:
    """Print what differs between two runs; with --out, also write it as a page with the curves of both."""
    if len(args.words) != 2:
        raise UsageError("run diff: expected two runs, e.g. run diff outputs/2026-11-21/101500-a-3f2a latest")
    first, second = (find_run(where) for where in args.words)
    print_text("\n".join(differ.diff_lines(first, second)))
    if args.out:
        differ.write_page(first, second, args.out)
        print_text(f"\npage     {display_path(args.out)}")
    return 0


def show(args: Namespace) -> int:
    """Print it; with --json, for programs. Changes nothing."""
    found = read_run_status(_find_run(args))
    print_text(json.dumps(found.plain(), indent=1) if args.json else "\n".join(status_lines(found)))
    return 0


def _find_run(args: Namespace) -> RunFolder:
    """The typed run, or the latest one. Raises UsageError for several, and for a sweep."""
    verb, where = args.verb, args.words[0] if args.words else "latest"
    if len(args.words) > 1:
        raise UsageError(f"run {verb}: expected one run, latest or a folder; for a sweep: run sweep {verb} latest")
    if SweepFolder(Path(where)).plan.is_file():
        raise UsageError(f"{where} is a sweep: run sweep {verb} {where}; a job of it: run {verb} {where}/000")
    return find_run(where)
