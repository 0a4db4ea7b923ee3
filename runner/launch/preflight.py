"""Checks before a job starts, without torch: the machine, the launcher, secrets in the job's spec.

spec.yaml must not have secrets: in texts of `tracker` (tags, notes) they are masked, elsewhere they are an error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from runner.core.errors import EnvironmentProblem, NotReady, RunnerError, SecurityError
from runner.core.rank_info import VARIABLES, RankInfo, is_launched_rank
from runner.run_dir.manifest import redact
from runner.spec.base import iter_leaves, origin_of
from runner.spec.job import JobSpec
from runner.tracker.text import print_text

TEXTS = "tracker"


def preflights(spec: JobSpec, *, here: bool) -> Iterator[tuple[str, Callable[[], None]]]:
    """(part of the job, check of this machine), in the order in which to install what is missing."""
    if here:
        yield "device", spec.device.preflight
        yield "sampler", spec.sampler.preflight_here
    yield "launch", spec.launch.preflight
    if here:
        yield "optimizer", spec.optimizer.preflight
        yield "model", spec.model.preflight
    yield "parallelism", spec.parallelism.preflight
    yield "sampler", spec.sampler.preflight
    yield "reward", spec.reward.preflight
    yield "environment", spec.environment.preflight
    yield "data", lambda: spec.data.preflight(spec.algorithm.item_kind)
    yield "chat", spec.chat.preflight
    yield "evaluation", spec.evaluation.preflight


def refuse_unready(checks: Iterable[Callable[[], None]]) -> None:
    """Raise NotReady with everything that is missing, or else the first other RunnerError."""
    faults: list[RunnerError] = []
    for check in checks:
        try:
            check()
        except RunnerError as error:
            if not (faults or isinstance(error, EnvironmentProblem)):
                raise
            faults.append(error)
    if faults:
        raise NotReady(faults)


def mask_secrets(spec: JobSpec, origins: Mapping[str, str], noted: set[str] | None = None) -> JobSpec:
    """The spec with secrets in its tracker's texts masked. Raises SecurityError for secrets elsewhere.

    noted: options for which a note was already printed, for the jobs of a sweep
    """
    noted = set() if noted is None else noted
    found = [key for key, value in iter_leaves(spec.model_dump(mode="json")) if _mask_value(value) != value]
    for key in found:
        if not key.startswith(f"{TEXTS}."):
            who = origin_of(key, origins)
            raise SecurityError(
                f"{key} looks like a secret, and spec.yaml would store it\n"
                "  leave it out: libraries read secrets from the environment, and reward.env=[NAME] passes a "
                f"variable to a reward{f'  [{who}]' if who else ''}"
            )
        if key not in noted:
            print_text(f"note: {key} looks like a secret and is masked", file=sys.stderr)
        noted.add(key)
    if not found:
        return spec
    masked = {name: _mask_value(value) for name, value in spec.tracker}
    return spec.model_copy(update={TEXTS: spec.tracker.model_copy(update=masked)})


def _mask_value(value: Any) -> Any:
    """The value with its texts masked."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {name: _mask_value(inner) for name, inner in value.items()}
    return type(value)(map(_mask_value, value)) if isinstance(value, list | tuple) else value


def refuse_other_launcher(spec: JobSpec) -> None:
    """Raise EnvironmentProblem for a launch that contradicts how this process was started."""
    own, is_rank = spec.launch, is_launched_rank(os.environ)
    if own.name == "torchrun" and not is_rank and not (os.environ.get("WORLD_SIZE") == "1" and own.world == 1):
        from runner.launch.torchrun import torchrun_command

        text = "launch=torchrun is for use inside torchrun, which starts the processes; type"
        raise EnvironmentProblem(f"{text}\n  {torchrun_command(own.devices, own.machines)}\n  or type launch=local")
    if is_rank and own.name not in ("torchrun", "local"):
        raise EnvironmentProblem(f"launch={own.name}: torchrun already started this process; leave it out")
    for name, value, unused in (("samplers", own.samplers, 0), ("attempts", own.attempts, 1)):
        if is_rank and value > unused:
            text = f"launch.{name}={value}: torchrun starts only ranks, once"
            raise EnvironmentProblem(f"{text}; type launch.{name}={unused}, or start without torchrun")
    if own.here and own.machines == 1 and not (own.queued or is_rank):
        _refuse_duplicate_launch(os.environ)


def has_terminal() -> bool:
    """Whether this process has a controlling terminal."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY))
    except OSError:
        return False
    return True


def _refuse_duplicate_launch(environment: Mapping[str, str]) -> None:
    """Raise EnvironmentProblem if this command was started several times, each for the whole job."""
    if environment.keys() >= set(VARIABLES[:2]):
        rank = RankInfo.from_environment(environment)  # of a PyTorchJob with one process per machine: raises
        if rank.size > 1:
            text = f"RANK and WORLD_SIZE set {rank}, but MASTER_ADDR or MASTER_PORT is not set; start with torchrun"
            raise EnvironmentProblem(f"{text}, or type: unset {' '.join(VARIABLES)}")
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", "1"))
    if tasks > 1 and not ("SLURM_PTY_PORT" in environment and has_terminal()):  # srun --pty: a shell in one task only
        raise EnvironmentProblem(
            f"Slurm started {tasks} tasks, and each would run the whole job; type srun --ntasks=1 run …, or "
            "launch=slurm with one task per machine; if the other tasks run something else: "
            "unset SLURM_STEP_NUM_TASKS"
        )
