"""Slurm's commands and their output: state, machines and cards of a job."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

from runner.core.device_kinds import CORE, ResourceRequest, kind_of
from runner.core.errors import EnvironmentProblem
from runner.core.fsync_io import storage_errors
from runner.run_dir.folder import OUTPUTS, RunFolder
from runner.tracker.jsonl import complete_lines

# States in which a job has ended. A preempted job that is requeued is not shown as PREEMPTED.
FINISHED_STATES = frozenset({
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
    "TIMEOUT",
})  # fmt: skip
# Reasons for which a job waits and will start by itself; other reasons are printed.
USUAL_REASONS = frozenset({
    "None", "Priority", "Resources", "JobArrayTaskLimit", "Dependency", "BeginTime", "Prolog", "Cleaning",
})  # fmt: skip
FOLDERS = OUTPUTS / ".slurm"  # <job>.runs: the runs of a Slurm job's commands; <job>.stages: its upstream runs
TIMEOUT_S = 60.0
LINE_BYTES = 2**16  # no line of metrics.jsonl is longer


def gres_of(given: str | None, need: ResourceRequest) -> str:
    """Slurm's name of the cards: `given` or the default; empty for cores."""
    return "" if need.kind == CORE else given or kind_of(need.kind).gres or need.kind


def signals_all() -> bool:
    """Whether Slurm on this cluster signals all processes of a job, not only the first."""
    lines = [line.partition("=") for line in run_slurm("scontrol", "show", "config").splitlines()]
    return {name.strip(): value.strip() for name, _, value in lines}.get("ProctrackType") == "proctrack/linuxproc"


def run_slurm(*command: str, stdin: str = "") -> str:
    """The output of a Slurm command. Raises EnvironmentProblem with Slurm's message if it fails."""
    if shutil.which(command[0]) is None:
        raise EnvironmentProblem(f"{command[0]} is not installed; run this on a login node")
    options = {"capture_output": True, "text": True, "check": False, "timeout": TIMEOUT_S}
    try:
        done: subprocess.CompletedProcess[str] = subprocess.run(command, input=stdin, **options)  # type: ignore[call-overload]
    except subprocess.TimeoutExpired as error:
        raise EnvironmentProblem(f"{command[0]} does not respond within {TIMEOUT_S:g} s") from error
    if done.returncode != 0:
        raise EnvironmentProblem(error_text(command[0], done.stderr) or f"{command[0]}: exit code {done.returncode}")
    return done.stdout


def state_of(job: str) -> tuple[str, str] | None:
    """A job's state and reason; None if Slurm has no record of it. Raises EnvironmentProblem."""
    try:
        fields = run_slurm("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T|%r").split()
    except EnvironmentProblem as error:
        if "Invalid job id" in str(error):
            return None
        raise
    state, _, reason = " ".join(fields).partition("|")
    return (state, reason) if state else None


def count_stage(stage: RunFolder) -> None:
    """Count the steps of an upstream run as steps of the Slurm job of this process, if any.

    Raises StorageError.
    """
    if "SLURM_JOB_ID" in os.environ:
        append_job_record("stages", str(stage.root))


def append_job_record(name: str, line: str) -> None:
    """Append a line to the records `name` of this Slurm job. Raises StorageError."""
    path = _records_path(name)
    with storage_errors(f"cannot write {path}"):
        FOLDERS.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")


def job_records(name: str) -> list[str]:
    """The lines of the records `name` of this Slurm job."""
    path = _records_path(name)
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []


def _records_path(name: str) -> Path:
    return FOLDERS / f"{os.environ['SLURM_JOB_ID']}.{name}"


def steps_of(run: RunFolder) -> int:
    """Finished steps of a run, and of upstream runs in this Slurm job.

    A job that made no step since it began is not requeued.
    """
    return sum(map(_steps_of, {run, *(RunFolder(Path(root)) for root in job_records("stages"))}))


def _steps_of(run: RunFolder) -> int:
    lines = [line for line in complete_lines(run.metrics, 2 * LINE_BYTES) if line.startswith('{"step"')]
    return int(json.loads(lines[-1])["step"]) if lines else 0


def error_text(command: str, output: str) -> str:
    """Slurm's error message in one line."""
    lines = [line.strip().removeprefix(f"{command}: ").removeprefix("error: ") for line in output.splitlines()]
    return f"{command}: " + "; ".join(dict.fromkeys(filter(None, lines))) if any(lines) else ""


ADDRESS = re.compile(r"\bNodeAddr=(\S+)")


def hosts(listed: str) -> list[str]:
    """The names in Slurm's list of nodes, such as `a[1-3,7],b2`."""
    is_one = not {"[", ","} & set(listed)
    return [listed] if is_one else run_slurm("scontrol", "show", "hostnames", listed).split()


def address_of(node: str) -> str:
    """Host name or address of a node; the node's name if Slurm shows no other."""
    found = ADDRESS.search(run_slurm("scontrol", "show", "node", node))
    return found[1] if found else node


NODES = re.compile(r"\bNodes=(\S+)")
CARDS = r"GRES=.*?\b{name}(?::\w+)?:\d+\(IDX:([\d,-]+)\)"


def allocated_cards(job: str, gres: str, node: str = "") -> list[int]:
    """Indices of a job's cards on a node ("" = its only node); empty if Slurm does not report them."""
    command = ["scontrol", "show", "job", "--details", job]
    output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    if node:
        lines = [(found[1], line) for line in output.splitlines() if (found := NODES.search(line))]
        output = "\n".join(line for nodes, line in lines if node in hosts(nodes))
    return parse_card_numbers(output, gres.partition(":")[0])


def parse_card_numbers(output: str, name: str) -> list[int]:
    """`… GRES=npu:910b:3(IDX:0-1,5)` → [0, 1, 5]."""
    found = re.search(CARDS.format(name=re.escape(name)), output)
    numbers: list[int] = []
    for piece in found[1].split(",") if found else ():
        low, _, high = piece.partition("-")
        numbers += range(int(low), int(high or low) + 1)
    return numbers
