"""`run doctor`: what this machine has, what is wrong, and what to type, for a device or a job.

The same list is the error of a job that cannot start here. torch is not imported, Hydra only to compose a job.
"""

from __future__ import annotations

import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from runner import __version__
from runner.cli.args import UsageError
from runner.core.errors import EnvironmentProblem, RunnerError
from runner.run_dir.manifest import code_state
from runner.spec.registry import default_registry
from runner.spec.suggest import unknown_name
from runner.tools.doctor import report
from runner.tools.doctor.cann import find_cann
from runner.tools.doctor.run_checks import checked_devices, run_checks
from runner.tools.doctor.system_info import SystemInfo, current_system, device_config, trial_simulator
from runner.tracker.text import print_text

if TYPE_CHECKING:  # whose import is that of Hydra
    from runner.cli.job_builder import ComposedJob
    from runner.spec.job import JobSpec

VERSIONS = ("torch", "torch-npu", "transformers", "peft", "vllm", "vllm-ascend")  # those that are installed
OWN = ("auto", "cpu", "cuda", "npu")  # devices that the doctor itself has checks of
ALONE = ("device", "sampler", "launch")  # what can be checked without a job
OWN_PARTS = ("vllm", "ray", "slurm")  # samplers and launchers that it has checks of
PLACES = (*ALONE, "parallelism")  # the groups that say where a job runs
REHEARSAL = "rehearse"


def show_version(args: Namespace) -> int:
    """`run --version`: version and commit of this project, then the versions of libraries; returns 0."""
    machine = current_system("auto")
    code = code_state(Path(__file__).resolve().parents[2], below="runner")
    changed = ", changed" if code.get("dirty") else ""
    print_text(f"run {__version__}" + (f" (commit {code['commit'][:12]}{changed})" if code.get("commit") else ""))
    versions = {"Python": ".".join(map(str, machine.python))}
    versions |= {name: machine.packages[name].version for name in VERSIONS if name in machine.packages}
    cann = find_cann(machine)
    versions["CANN"] = "not installed" if cann is None else cann.version or f"unknown version in {cann.home}"
    print_text(", ".join(f"{name} {version}" for name, version in versions.items()))
    return 0


def show(args: Namespace) -> int:
    """Examine this machine; returns 0, 2 where something cannot work, 1 where a check of ours failed."""
    if args.prepare:
        return _prepare(args)
    if suites := [word.removeprefix("suite=") for word in args.words if word.startswith("suite=")]:
        return _show_suite(args.words, suites[0])
    machine = _machine(args)
    entries, devices = run_checks(machine, trial=not args.no_trial, debug=args.debug), checked_devices(machine)
    if args.json:
        found = list(entries)
        print_text(report.as_json(found, devices))
    else:
        found = report.print_report(entries, devices, sys.stdout)
    return report.exit_code(found)


def _show_suite(words: Sequence[str], name: str) -> int:
    """Print how an environment for a harness of `run eval` is made. Raises UsageError."""
    from runner.tools.eval_suites import SUITES

    if len(words) > 1 or name not in SUITES:
        raise UsageError(f"run doctor: expected suite={'|'.join(SUITES)} and no other words")
    print_text(SUITES[name].install_line())
    print_text(f"  then: run eval latest suite={name} tasks=TASK --suite-python .venv-eval/bin/python")
    return 0


def diagnosis(composed: ComposedJob, command: Sequence[str]) -> EnvironmentProblem | None:
    """The error of a job that this machine is not ready for; None where the doctor finds no step.

    It has the steps of `run doctor` with the words of this `command`, and a command that tries the job here.
    """
    spec = composed.spec
    steps = list(report.numbered_steps(run_checks(machine_for(spec), trial=False)))
    if not steps:
        return None
    named = ", ".join(f"{group}={getattr(spec, group).name}" for group in ALONE)
    lines = [f"this machine is not ready for this job ({named}); do this, in order:", *steps]
    lines.append(f"  for details: {shlex.join(['run', 'doctor', *command])}")
    if words := _rehearsal(composed):
        lines.append(f"  to try the job on this machine first: {shlex.join(['run', *words])}")
    return EnvironmentProblem("\n".join(lines))


def machine_for(spec: JobSpec) -> SystemInfo:
    """This machine, to be examined for a job."""
    from runner.launch.preflight import preflights
    from runner.launch.slurm.srun_task import is_outside_slurm

    here = spec.launch.here and not is_outside_slurm(spec)
    examined = {"device", *(group for group in ALONE if getattr(spec, group).name in OWN_PARTS)}
    return current_system(
        spec.device.name,
        sampler=spec.sampler.name if here else None,
        launch=spec.launch.name,
        elsewhere=None if here else f"launch={spec.launch.name} starts the job's processes on other machines",
        parts=tuple((name, check) for name, check in preflights(spec, here=here) if name not in examined),
    )


def _rehearsal(composed: ComposedJob) -> list[str]:
    """The words that try a job on this machine's CPU; empty where it cannot be composed.

    The job's own words with device=cpu, if this machine is ready for them, or, for a recipe that is made for cards,
    the recipe with `rehearse`.
    """
    from runner.cli.config_sources import GROUP
    from runner.cli.job_builder import compose_job
    from runner.launch.preflight import preflights, refuse_unready

    spec, typed = composed.spec, composed.overrides
    kept = [word for word in typed if word.lstrip("+").partition("=")[0].partition(".")[0] not in PLACES]
    recipes = next((word.partition("=")[2].strip("[]") for word in kept if word.lstrip("+").startswith(GROUP)), "")
    stand_ins = ["sampler=torch"] if spec.sampler.starts_engine else []
    reward = ["reward=rehearsal"] if spec.algorithm.needs_reward else []
    for words in ([*kept, *stand_ins, "device=cpu"], [f"+{GROUP}=[{recipes},{REHEARSAL}]", *reward, *stand_ins]):
        try:
            found = compose_job(words).spec
            refuse_unready(check for _, check in preflights(found, here=True))
        except RunnerError:
            continue
        if found.device.is_cpu and found.launch.alone and found.model.source is None:
            return words
    return []


def _prepare(args: Namespace) -> int:
    """Do ahead what the first use of a device does. Raises EnvironmentProblem, UsageError."""
    if args.words or args.json or args.no_trial:
        raise UsageError(f"run doctor --prepare {args.prepare} takes no other words, because it checks nothing")
    known = default_registry().classes("device")
    if args.prepare not in known:
        raise UsageError(f"run doctor --prepare: {unknown_name('device', args.prepare, known)}")
    device_config(args.prepare).preflight()
    print_text(f"{args.prepare} is ready")
    return 0


def _machine(args: Namespace) -> SystemInfo:
    """This machine, for the device, sampler and launcher that are named, or for a job.

    Raises UsageError, and what composing a job raises.
    """
    named = dict(word.partition("=")[::2] for word in args.words)
    if args.spec or len(named) < len(args.words) or set(named) - set(ALONE):
        from runner.cli.job import compose_from_args

        return machine_for(compose_from_args(args, args.words).spec)
    classes = default_registry().classes
    known = {
        "device": tuple(sorted(name for name in classes("device") if name in OWN or trial_simulator(name))),
        **{group: tuple(one for one in classes(group) if one != "none") for group in ("sampler", "launch")},
    }
    for key, value in named.items():
        if value not in known[key]:
            raise UsageError(f"run doctor: {unknown_name(key, value, known[key])}")
    return current_system(named.pop("device", "auto"), **named)
