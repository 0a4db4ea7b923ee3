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
from runner.registry import default_registry


def show(args: Namespace) -> int:
    """Examine this machine; returns 0, 2 where something cannot work, 1 where a check of ours failed."""
    if args.prepare:
        return _prepare(args)
    machine = of_this_process(*_wanted(args.words))
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


def _wanted(words: Sequence[str]) -> tuple[Wanted, str | None, str | None]:
    """The device, the sampler and the launcher that are named, auto and None where they are not. Raises UsageError."""
    classes = default_registry().classes
    known = {
        "device": get_args(Wanted),
        **{group: tuple(one for one in classes(group) if one != "none") for group in ("sampler", "launch")},
    }
    named = dict(word.partition("=")[::2] for word in words)
    if len(named) < len(words) or any(value not in known.get(key, ()) for key, value in named.items()):
        said = " ".join(f"[{key}={'|'.join(values)}]" for key, values in known.items())
        raise UsageError(f"run doctor: {said} are expected, each once, not {' '.join(words)}")
    device: Wanted = next((one for one in get_args(Wanted) if one == named.get("device")), "auto")
    return device, named.get("sampler"), named.get("launch")
