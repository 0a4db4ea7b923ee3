"""Submits jobs to Slurm through submitit, as job arrays: what each of them asks Slurm for.

options, Need ─▶ submitit ─▶ sbatch file ─┬─▶ sbatch --test-only: what Slurm refuses, before anything is made
                                          └─▶ sbatch: the array's number
submitit's pickles are not used: what a job reads on its node is plain (`batch`), and an index is a job's number.
"""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.errors import EnvironmentProblem
from runner.slurm.commands import GRES, told, words
from runner.sweep.config import SweepConfig
from runner.sweep.need import Need

if TYPE_CHECKING:
    from submitit import SlurmExecutor

MINUTE_S = 60.0


def resources(options: SweepConfig, need: Need) -> dict[str, Any]:
    """What one job asks for, by submitit's names; what sbatch alone knows is in `additional_parameters`."""
    asked: dict[str, Any] = {
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "nodes": 1,
        "ntasks_per_node": 1,
        "cpus_per_task": options.cpus or (need.count if need.kind == "core" else None),
        "gres": None if need.kind == "core" else f"{gres_of(options, need)}:{need.count}",
        "time": time_min(options),
        "wckey": None,
        "stderr_to_stdout": True,
        "use_srun": False,
    }
    more: dict[str, Any] = {"requeue": True, "signal": f"B:USR2@{math.ceil(options.grace_s)}"}
    return {**asked, "additional_parameters": {**more, **dict(options.sbatch)}}


def gres_of(options: SweepConfig, need: Need) -> str:
    """What Slurm calls the cards; empty for cores."""
    return "" if need.kind == "core" else options.gres or GRES[need.kind]


def time_min(options: SweepConfig) -> int | None:
    """Slurm's limit for a job in minutes; None: that of the partition, or of sweep.sbatch.

    A minute more than the sweep's own, which lets a job save and end, and tells why.
    """
    if options.timeout_s is None:
        return None
    return math.ceil((options.timeout_s + options.grace_s) / MINUTE_S) + 1


def array_of(indices: Iterable[int], at_once: int | None) -> str:
    """`0-3,7%2`: the jobs of an array, and how many of them at once."""
    runs: list[list[int]] = []
    for index in sorted(indices):
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    text = ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in runs)
    return text if at_once is None else f"{text}%{at_once}"


def try_out(options: SweepConfig, need: Need, count: int) -> None:
    """Ask Slurm whether it would take such jobs. Raises EnvironmentProblem with what it says against it."""
    executor = executor_of(Path.cwd(), resources(options, need), {"array": array_of(range(count), options.parallel)})
    text = executor._make_submission_file_text("true", "")
    try:
        told("sbatch", "--test-only", stdin=text)
    except EnvironmentProblem as error:
        raise EnvironmentProblem(f"Slurm refuses a job with {need}: {error}") from error


def submit(
    options: SweepConfig, need: Need, batch: Path, name: str, indices: Iterable[int], after: Iterable[str]
) -> str:
    """Submit the jobs of a batch as one array; its number. `after`: arrays that must have ended before it begins.

    Raises EnvironmentProblem with Slurm's own words where it refuses.
    """
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    own: dict[str, Any] = {
        "comment": batch.stem,
        "array": array_of(indices, options.parallel),
        "output": str(batch.parent.parent / "jobs" / "%3a.log"),
    }
    if after := list(after):
        own["dependency"] = "afterany:" + ":".join(after)
    executor = executor_of(batch.parent, {**resources(options, need), "job_name": name}, own)
    command = ["exec", sys.executable, "-P", "-m", "runner.sweep.slurm.job", str(batch)]
    try:
        job: Any = executor._submit_command(shlex.join(command))
    except (FailedJobError, FailedSubmissionError) as error:
        raise EnvironmentProblem(f"Slurm refuses the jobs: {words('sbatch', str(error)) or error}") from error
    return str(job.job_id)


def executor_of(folder: Path, asked: Mapping[str, Any], own: Mapping[str, Any]) -> SlurmExecutor:
    """submitit's executor, set up. Raises EnvironmentProblem where it is missing."""
    try:
        from submitit import SlurmExecutor
    except ImportError as error:
        text = "sweep.on=slurm needs the package submitit: pip install 'posttrain-run[slurm]'"
        raise EnvironmentProblem(text) from error
    told("sbatch", "--version")
    executor = SlurmExecutor(folder)
    given = {key: value for key, value in asked.items() if value is not None or key in ("time", "wckey")}
    executor.update_parameters(**{**given, "additional_parameters": {**asked["additional_parameters"], **own}})
    return executor
