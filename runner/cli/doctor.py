"""`run doctor`: what this machine has, what is wrong with it, and what to type; neither torch nor Hydra is imported."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence

from runner.cli.args import UsageError
from runner.spec.decode import unknown_name
from runner.spec.registry import default_registry
from runner.tools.doctor import report
from runner.tools.doctor.examine import examine, looked_at
from runner.tools.doctor.machine import device_config, of_this_process, trial_simulator

OWN = ("auto", "cpu", "cuda", "npu")  # devices that the doctor itself has checks of


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
    """Do ahead what the first use of a device does. Raises EnvironmentProblem, UsageError."""
    if args.words or args.json or args.no_trial:
        raise UsageError(f"run doctor --prepare {args.prepare}: it examines nothing, and takes nothing else")
    known = default_registry().classes("device")
    if args.prepare not in known:
        raise UsageError(f"run doctor --prepare: {unknown_name('device', args.prepare, known)}")
    device_config(args.prepare).preflight()
    print(f"{args.prepare} is ready")
    return 0


def _wanted(words: Sequence[str]) -> tuple[str, str | None, str | None]:
    """The device, the sampler and the launcher that are named, auto and None where they are not. Raises UsageError."""
    classes = default_registry().classes
    known = {
        "device": tuple(sorted(name for name in classes("device") if name in OWN or trial_simulator(name))),
        **{group: tuple(one for one in classes(group) if one != "none") for group in ("sampler", "launch")},
    }
    named = dict(word.partition("=")[::2] for word in words)
    wrong = [(key, value) for key, value in named.items() if value not in known.get(key, ())]
    for key, value in wrong:
        if key in known and value:
            raise UsageError(f"run doctor: {unknown_name(key, value, known[key])}")
    if wrong or len(named) < len(words):
        said = " ".join(f"[{key}={'|'.join(values)}]" for key, values in known.items())
        raise UsageError(f"run doctor: {said} are expected, each once, not {' '.join(words)}")
    return named.get("device", "auto"), named.get("sampler"), named.get("launch")
