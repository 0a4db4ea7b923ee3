"""launch=slurm: one task per machine of a Slurm job, however the command was started.

no Slurm job                     ─▶ submitted (`submission`)
a job's script, or salloc's shell ─▶ srun: the same command, once on each machine
a task of srun                   ─▶ machines, number, address, cards from Slurm's variables, as overrides

The script of a submitted job begins the run or resumes it:

sbatch ─▶ python -m runner.launch.slurm.srun_task FOLDER WORDS… ─▶ srun ─▶ run resume FOLDER WORDS…, once per machine

SIGUSR2   Slurm's time limit is near: the run saves and ends with 75, and this job goes back into the queue
SIGUSR1   the same, but it stays out of the queue
SIGTERM   Slurm ends the job; it signals the tasks itself, and requeues a preempted job itself

A requeued job continues in the same run folder; in a script with several commands, each continues its own run.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from runner.core.device_kinds import CPU, find_kind
from runner.core.errors import EnvironmentProblem, Interrupted
from runner.core.subprocess import ChildProcess
from runner.launch.slurm.commands import (
    address_of,
    allocated_cards,
    append_job_record,
    hosts,
    job_records,
    run_slurm,
    steps_of,
)
from runner.run_dir.folder import RunFolder
from runner.run_dir.manifest import fingerprint
from runner.spec.base import COMMAND_LINE
from runner.spec.job import JobSpec
from runner.tracker.text import print_text

NAME = "slurm"
DEFAULT = f"launch/{NAME}"  # the origin of a default
FIRST_PORT, PORTS = 15000, 15000  # below the ephemeral ports
SPECIAL_STEPS = 2**32 - 256  # from here on: a job's script or salloc's shell, not srun
OF_SUBMISSION = {"partition", "account", "qos", "cpus", "time", "preempt_notice_s", "sbatch", "follow"}
WAIT_S = 120  # from the first machine that ends to the last one: they end together
REQUEUE_CODE = 75  # exit code of a run that can be requeued
LIMIT, ENDED = signal.SIGUSR2, signal.SIGTERM
WARNINGS = (signal.SIGUSR1, LIMIT)


class Preempted(Interrupted):
    """Slurm requested the end of the job; it saved, if it had finished a step."""

    def __init__(self, message: str) -> None:
        super().__init__(signal.SIGTERM, message)
        self.exit_code = REQUEUE_CODE


@dataclass(frozen=True, slots=True)
class SlurmTask:
    """This task of an srun step: number `node` of one per machine."""

    job: int
    machines: int
    node: int
    node_list: str  # the machines' names, in Slurm's short form

    @classmethod
    def from_environment(cls, variables: Mapping[str, str]) -> SlurmTask | None:
        """The task by Slurm's variables; None outside a step. Raises EnvironmentProblem for two on a machine."""
        if "SLURM_JOB_ID" not in variables or not 0 <= int(variables.get("SLURM_STEP_ID", -1)) < SPECIAL_STEPS:
            return None
        machines, tasks = (int(variables[f"SLURM_STEP_NUM_{name}"]) for name in ("NODES", "TASKS"))
        if tasks != machines:
            text = f"Slurm started {tasks} tasks on {machines} machines, but launch=slurm needs one on each"
            raise EnvironmentProblem(f"{text}; type srun --nodes={machines} --ntasks-per-node=1 …, or leave srun out")
        job, node = int(variables["SLURM_JOB_ID"]), int(variables["SLURM_NODEID"])
        return cls(job, machines, node, variables["SLURM_STEP_NODELIST"])

    @property
    def address(self) -> str:
        """The address of machine 0, at a port derived from the job's number. Raises EnvironmentProblem."""
        return f"{address_of(hosts(self.node_list)[0])}:{FIRST_PORT + self.job % PORTS}"

    @property
    def name(self) -> str:
        """Slurm's name of this machine."""
        return hosts(self.node_list)[self.node]


def is_outside_slurm(spec: JobSpec) -> bool:
    """Whether this job is for Slurm, and this process is in no Slurm job."""
    return spec.launch.name == NAME and "SLURM_JOB_ID" not in os.environ


def slurm_layout(own: Mapping[str, Any], origins: Mapping[str, str], device: str) -> list[str]:
    """The layout of the Slurm job as overrides of `launch`; origins: who set its options.

    Makes cards visible that Slurm does not list in a variable. Raises EnvironmentProblem if an option contradicts
    Slurm.
    """
    typed = {name for name, value in own.items() if value is not None and origins.get(f"launch.{name}") == COMMAND_LINE}
    for name in typed & {"node_rank", "rdzv_endpoint"}:
        raise EnvironmentProblem(f"launch.{name}={own[name]}: Slurm sets it; leave it out")
    if "SLURM_JOB_ID" not in os.environ:
        return []
    for name in typed & OF_SUBMISSION:
        text = f"is for submitting a job, but this is Slurm job {os.environ['SLURM_JOB_ID']}; leave it out"
        raise EnvironmentProblem(f"launch.{name}: {text}")
    is_set = origins.get("launch.nodes", DEFAULT) not in (DEFAULT, "spec.yaml")
    if own.get("nodes") != _machines() and is_set:
        raise EnvironmentProblem(f"launch.nodes={own.get('nodes')}: this Slurm job has {_machines()}; leave it out")
    task = SlurmTask.from_environment(os.environ)
    found: dict[str, Any] = {"nodes": _machines()}
    if task is not None and task.machines > 1:
        found |= {"node_rank": task.node, "rdzv_endpoint": task.address}
    found |= _devices(own, origins, _cards(task, own.get("gres"), device))
    return [f"launch.{name}={value}" for name, value in found.items() if name not in typed]


def _machines() -> int:
    """Number of machines of this process's step or, outside a step, of its Slurm job."""
    task = SlurmTask.from_environment(os.environ)
    count = os.environ.get("SLURM_JOB_NUM_NODES", os.environ.get("SLURM_NNODES", "1"))
    return task.machines if task is not None else int(count)


def _devices(own: Mapping[str, Any], origins: Mapping[str, str], cards: int | None) -> dict[str, Any]:
    """The number of ranks as an override, if it follows from the number of cards of this machine."""
    if cards is None:
        return {}
    beside = own.get("samplers") or 0
    if origins.get("launch.devices", DEFAULT) == DEFAULT and cards > beside:
        return {"devices": cards - beside}
    if (wanted := own.get("devices", 1) + beside) > cards:
        raise EnvironmentProblem(f"launch.devices needs {wanted} cards, but Slurm gave this job {cards} per machine")
    return {}


def _cards(task: SlurmTask | None, gres: str | None, device: str) -> int | None:
    """Number of the job's cards on this machine; None if Slurm does not report it.

    Makes the cards visible to this process if Slurm does not.
    """
    kind = find_kind(device)
    if kind.gres and kind.visible and not kind.shown_by_slurm and task is not None:
        if numbers := allocated_cards(str(task.job), gres or kind.gres, task.name):
            os.environ[kind.visible] = ",".join(map(str, numbers))
        return len(numbers) or None
    count = os.environ.get("SLURM_GPUS_ON_NODE", "")
    return int(count) if (kind.shown_by_slurm or device == "auto") and count.isdecimal() else None


def exec_srun(spec: JobSpec) -> None:
    """In a Slurm job outside a task: replace this process by srun, which runs the command on each machine.

    Returns otherwise; in a task, after a warning if it has too few cores. Raises EnvironmentProblem if srun is missing.
    """
    if spec.launch.name != NAME or "SLURM_JOB_ID" not in os.environ:
        return
    if SlurmTask.from_environment(os.environ) is not None:
        return _say_few_cores(spec)
    machines, job = _machines(), os.environ["SLURM_JOB_ID"]
    command = srun_command([sys.executable, "-P", "-m", "runner", *sys.argv[1:]], machines)
    print_text(f"srun     {machines} × this command, one on each machine of Slurm job {job}", flush=True)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        raise EnvironmentProblem(f"{command[0]} cannot be started: {error.strerror}") from error


def _say_few_cores(spec: JobSpec) -> None:
    """Warn if processes on cards share cores: most clusters give a task with cards a single core."""
    processes, cores = spec.launch.devices + spec.launch.samplers, len(os.sched_getaffinity(0))
    if spec.device.kind is not CPU and cores < processes:
        who = f"{processes} process{'' if processes == 1 else 'es'} on cards"
        text = f"{who} have {cores} core{'' if cores == 1 else 's'} in total, which is slow"
        more = f"to get more, type launch.cpus={8 * processes}, or --cpus-per-task in your own script"
        print_text(f"slurm    {text}; {more}", flush=True)


def srun_command(command: Sequence[str], machines: int) -> list[str]:
    """`command` as one task on each machine of this Slurm job, with all its cores there.

    A machine that is left alone ends after WAIT_S: it may wait for one that failed before it connected.
    """
    cores = os.environ.get("SLURM_CPUS_PER_TASK")  # srun does not inherit this from sbatch
    more = [f"--cpus-per-task={cores}"] if cores else []
    return [
        "srun",
        f"--nodes={machines}",
        f"--ntasks={machines}",
        "--cpu-bind=none",
        f"--wait={WAIT_S}",
        *more,
        *command,
    ]


@contextmanager
def handle_slurm_signals(spec: JobSpec) -> Iterator[None]:
    """Handle Slurm's signals inside the block. Raises Preempted if Slurm ended the job."""
    if spec.launch.name != NAME or SlurmTask.from_environment(os.environ) is None:
        yield
        return
    for number in WARNINGS:
        signal.signal(number, _save_and_end)
    try:
        yield
    except Interrupted as error:
        if error.exit_code != 128 + signal.SIGTERM:
            raise
        text = f"{error}\n  stopped by Slurm: exit code {REQUEUE_CODE}, a requeue continues from there"
        raise Preempted(text) from error


def _save_and_end(number: int, frame: FrameType | None) -> None:
    """Send SIGTERM to this process once, however often Slurm warns."""
    for warning in WARNINGS:
        signal.signal(warning, signal.SIG_IGN)
    os.kill(os.getpid(), signal.SIGTERM)


def record_run_folder(folder: RunFolder) -> None:
    """On machine 0, record the run folder of this command, for a requeue. Raises StorageError."""
    if os.environ.get("SLURM_NODEID", "0") == "0":
        append_job_record("runs", json.dumps([*_this_step(), _command_key(), str(folder.root)]))


def requeued_folder(where: Path | None) -> Path | None:
    """The folder in which this command of a requeued Slurm job continues: `where` or the recorded one.

    None if the command had not begun, and outside a task.
    """
    if _this_step()[0] == 0 or SlurmTask.from_environment(os.environ) is None:
        return None
    found = where or _recorded_folder()
    return found if found is not None and RunFolder(found).spec.is_file() else None


def _recorded_folder() -> Path | None:
    """The run that this command began before the requeue; equal commands are distinguished by their order."""
    records: list[tuple[int, int, str, str]] = []
    for line in job_records("runs"):
        restarts, step, key, folder = json.loads(line)
        # Restarts increase, and a command has one record in a step: otherwise the first ones are of another job.
        if records and (restarts < records[-1][0] or (restarts, step, key) in {record[:3] for record in records}):
            records.clear()
        records.append((restarts, step, key, folder))
    now, own_step = _this_step()
    same = [record for record in records if record[2] == _command_key()]
    before = list(dict.fromkeys(folder for restarts, _, _, folder in same if restarts < now))
    begun = sum(restarts == now and step != own_step for restarts, step, _, _ in same)
    return Path(before[begun]) if begun < len(before) else None


def _this_step() -> tuple[int, int]:
    """How often Slurm restarted this job, and the number of this step since then."""
    return int(os.environ.get("SLURM_RESTART_COUNT", "0")), int(os.environ.get("SLURM_STEP_ID", "0"))


def _command_key() -> str:
    """A digest of the words of this command, which may have secrets."""
    return fingerprint({"words": sys.argv[1:]})


def main(root: str, words: Sequence[str]) -> int:
    """Run or resume the run on all machines; returns its exit code, 0 if the job was requeued."""
    received: list[int] = []
    forwarded: list[int] = []  # the first warning; Slurm itself sends SIGTERM to the tasks

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if number != ENDED and not forwarded:
            forwarded.append(number)

    for number in (*WARNINGS, ENDED):
        signal.signal(number, note)
    run = RunFolder(Path(root))
    before = steps_of(run)
    command = [sys.executable, "-P", "-m", "runner", "resume", root, *words]
    step = ChildProcess(srun_command(command, int(os.environ["SLURM_JOB_NUM_NODES"])), own_session=False, stdin=None)
    code = step.wait_and_forward(forwarded)
    if code == REQUEUE_CODE and LIMIT in received:
        return requeue(run, before)
    return code if code >= 0 else 128 - code


def requeue(run: RunFolder, before: int) -> int:
    """Requeue this job if the run has made more steps than `before`; returns the exit code."""
    if steps_of(run) <= before:
        print("no step was finished within Slurm's time limit: not requeued; raise launch.time", flush=True)
        return REQUEUE_CODE
    try:
        run_slurm("scontrol", "requeue", os.environ["SLURM_JOB_ID"])
    except EnvironmentProblem as error:
        print_text(f"not requeued: {error}", flush=True)
        return REQUEUE_CODE
    print("requeued: Slurm restarts the job, and the run continues from its checkpoint", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
