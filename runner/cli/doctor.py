"""`run doctor`: what this machine has, what is wrong with it, and what to type; neither torch nor Hydra is imported."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import get_args

from runner.cli.args import UsageError
from runner.device.npu_sim.prepare import prepare
from runner.doctor import report
from runner.doctor.examine import examine, looked_at
from runner.doctor.machine import Wanted, of_this_process


def show(args: Namespace) -> int:
    """Examine this machine; returns 0, 2 where something cannot work, 1 where a check of ours failed."""
    if args.prepare:
        return _prepare(args)
    machine = of_this_process(_wanted(args.words))
    entries, devices = examine(machine, trial=not args.no_trial, debug=args.debug), looked_at(machine)
    if args.json:
        found = list(entries)
        print(report.as_json(found, devices))
    else:
        found = report.show(entries, devices, sys.stdout)
    return report.exit_code(found)


def _prepare(args: Namespace) -> int:
    """Make the simulated NPU ahead of its first use. Raises EnvironmentProblem, UsageError."""
    if args.words or args.json or args.no_trial:
        raise UsageError(f"run doctor --prepare {args.prepare}: it examines nothing, and takes nothing else")
    parts = prepare(lambda text: print(text, file=sys.stderr, flush=True))
    print(f"{args.prepare} is ready: {parts.built}")
    return 0


def _wanted(words: Sequence[str]) -> Wanted:
    """The device of `device=NAME`; auto where none is named. Raises UsageError."""
    known: dict[str, Wanted] = {f"device={name}": name for name in get_args(Wanted)}
    if len(words) == 1 and words[0] in known:
        return known[words[0]]
    if words:
        raise UsageError(f"run doctor: one device={'|'.join(get_args(Wanted))} is expected, not {' '.join(words)}")
    return "auto"
