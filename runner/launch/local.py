"""Run a job: start it in a new folder or resume it, with at most `launch.attempts` attempts.

                        ┌─ one device ───────────▶ Session, in this process
start, resume ─▶ begin ─┤
                        └─ several ──▶ Supervisor ─────┬──▶ rank 0: Session, RunRecords
                                                       ├──▶ rank 1 …: Session, NullRecords
                                                       └──▶ sampler 0 …
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.core.errors import EnvironmentProblem, Interrupted, Problem, RunnerError, SpecError
from runner.core.rank_info import RankInfo, is_launched_rank, without_rank_variables
from runner.data.config import today
from runner.launch.preflight import mask_secrets, preflights, refuse_other_launcher, refuse_unready
from runner.launch.run_messages import changed_evaluation_note, longer_schedule_note
from runner.launch.run_records import (
    TRUST_REMOTE_CODE,
    archive_attempt,
    is_upstream_run,
    spec_to_write,
    status_of,
    write_spec,
    write_yaml,
)
from runner.launch.session import WITHOUT_CALLBACKS, Session
from runner.run_dir.folder import (
    RunFolder,
    claim_folder,
    create_run_folder,
    display_path,
    hold_lock,
    point_latest,
    read_mapping,
    read_spec,
    refuse_used_folder,
    run_argument,
)
from runner.run_dir.manifest import immutable_fields, redact_values
from runner.run_dir.user_files import copy_user_files
from runner.spec.base import COMMAND_LINE
from runner.spec.job import JobSpec
from runner.spec.registry import default_registry
from runner.tracker.console import Console
from runner.tracker.text import labeled_line, print_text

if TYPE_CHECKING:  # most jobs are one process, which needs nothing of what starts several
    from runner.launch.multi_node import PeerNodes
    from runner.launch.worker_process import LocalWorker, WorkerSpec

log = logging.getLogger("runner")


def start_run(spec: JobSpec, typed: Sequence[str], origins: Mapping[str, str], where: Path | None = None) -> int:
    """Run a new job. The run folder, spec.yaml and `latest` exist before torch is imported.

    where: the run's folder, which `latest` then does not follow; None = a new one below outputs/
    """
    refuse_other_launcher(spec)
    spec = mask_secrets(spec, origins)
    typed_job = spec.model_dump(mode="json")
    if is_other_machine(spec):
        return join_run(spec, typed_job)
    if where is not None:
        refuse_used_folder(where)  # before upstream runs, which may take hours
    if spec.launch.queued:
        from runner.launch.slurm import srun_task, submission
    if later := spec.launch.queued and srun_task.is_outside_slurm(spec):
        spec = check_spec(spec)
        submission.check_submission(spec)
    else:
        spec = prepare_spec(spec)
    folder = create_run_folder(spec.name) if where is None else claim_folder(where)
    with hold_lock(folder):
        copy_user_files(spec, folder)
        write_spec(folder, spec)
        if spec.launch.queued and not later:
            srun_task.record_run_folder(folder)
        suffix = {} if where is None else {"run_id_suffix": secrets.token_hex(4)}  # names below outputs/ are unique
        write_yaml(folder.overrides, {"typed": redact_values(typed), "set_by": dict(origins), **suffix})
        if where is None:
            point_latest(folder)
        if not later:
            return begin_attempt(spec, folder, 1, typed_job)
        submission.mark_waiting(folder)
    return submission.submit(spec, folder, [TRUST_REMOTE_CODE] if spec.model.runs_remote_code else [])


def _handle_slurm_signals(spec: JobSpec) -> AbstractContextManager[None]:
    """A block in which a job in Slurm's queue ends as Slurm requires."""
    if not spec.launch.queued:
        return nullcontext()
    from runner.launch.slurm import srun_task

    return srun_task.handle_slurm_signals(spec)


def begin_attempt(spec: JobSpec, folder: RunFolder, attempt: int, typed: Mapping[str, Any]) -> int:
    """Make an attempt as `launch` says."""
    return int(default_registry().factory(spec.launch)(spec, folder, attempt, typed))


def prepare_spec(spec: JobSpec) -> JobSpec:
    """The checked spec with its weights. Raises as `check_spec`, or as a recipe ends."""
    spec = check_spec(spec, here=spec.launch.here)
    if spec.init_from is None and not spec.algorithm.upstream_models():
        return spec
    from runner.launch.upstream_runs import resolve_init_from, resolve_other_models

    return resolve_other_models(resolve_init_from(spec))


def check_spec(spec: JobSpec, *, here: bool = False) -> JobSpec:
    """The spec with absolute paths and its day, if nothing is wrong that can be seen without torch.

    here: the job's processes run on this machine, so its device and packages are checked too. Raises SpecError,
    DataError, NotReady.
    """
    parts = ("data", "chat", "model", "algorithm", "reward", "environment", "evaluation")
    found = {name: getattr(spec, name).with_absolute_paths() for name in parts}
    found["chat"] = found["chat"].model_copy(update={"date": spec.chat.date or today()})
    spec = spec.model_copy(update=found)
    if spec.model.source is not None or spec.reward.uses_device_model() or spec.evaluation.sets:
        from runner.inference.model_source import resolve_model_path

        names = ("model", "reward", "evaluation")
        found = {name: getattr(spec, name).with_resolved_source(resolve_model_path) for name in names}
        spec = spec.model_copy(update=found)
    refuse_unready(check for _, check in preflights(spec, here=here))
    return spec


def resume(folder: RunFolder, before: JobSpec, spec: JobSpec, typed: Sequence[str] = ()) -> int:
    """Resume a run; `spec` is `before` with overrides. A finished run is left alone, with a message."""
    spec = mask_secrets(spec, dict.fromkeys((word.partition("=")[0] for word in typed), COMMAND_LINE))
    if not is_other_machine(spec):  # there machine 0 compares, which may rewrite spec.yaml while it is read
        refuse_other_job(before, spec)
    status, here = read_status(folder), display_path(folder.root)
    early = status.get("stopped_early") if spec.callbacks == before.callbacks else None
    longer = spec.steps > before.steps or spec.epochs is not None
    if status.get("state") == "done" and not longer and (early or "stopped_early" not in status):
        more = f"run resume {here} " + (WITHOUT_CALLBACKS if early else f"steps={before.steps * 2}")
        refuse_ignored_changes(before, spec_to_write(spec), more)
        print_text(f"{here}: {early or f'finished after {before.steps} steps'}; to continue: {more}")
        return 0
    refuse_other_launcher(spec)
    typed_job = spec.model_dump(mode="json")
    if is_other_machine(spec):
        return join_run(spec, typed_job)
    from runner.launch.slurm import srun_task, submission

    if status.get("state") != submission.WAITING:
        for note in filter(None, (longer_schedule_note(before, spec), changed_evaluation_note(before, spec))):
            print_text(note, file=sys.stderr)
    if srun_task.is_outside_slurm(spec):
        submission.refuse_queued(folder)
        submission.check_submission(spec)
        with hold_lock(folder):  # the queued job reads the launch options there, and cannot override them
            write_spec(folder, before.model_copy(update={"launch": spec.launch}))
        return submission.submit(spec, folder, _without_launch_options(typed))
    if status.get("state") == submission.WAITING:
        with hold_lock(folder):
            spec = prepare_spec(spec)
            write_spec(folder, spec)
            return begin_attempt(spec, folder, 1, typed_job)
    if spec.launch.here:
        refuse_unready([spec.device.preflight])
    with hold_lock(folder):
        attempt = next_attempt(folder)
        archive_attempt(folder, attempt, typed)
        if spec != before or read_spec(folder).note:
            write_spec(folder, spec)
        return begin_attempt(spec, folder, attempt, typed_job)


def _without_launch_options(words: Sequence[str]) -> list[str]:
    return [word for word in words if not word.lstrip("+").startswith(("launch=", "launch."))]


def refuse_other_job(before: JobSpec, spec: JobSpec) -> None:
    """Raise SpecError naming every override that would make this another run."""
    if spec.steps < before.steps:
        message = f"{spec.steps} is below the run's {before.steps}; steps can only increase"
        raise SpecError([Problem("steps", message, COMMAND_LINE)])
    began, now = immutable_fields(before), immutable_fields(spec)
    text = "cannot change in a resumed run; start a new run to change it"
    if changed := [name for name in now if began[name] != now[name]]:
        raise SpecError([Problem(name, text, COMMAND_LINE) for name in changed])


def refuse_ignored_changes(before: JobSpec, spec: JobSpec, more: str) -> None:
    """Raise SpecError naming every override of a finished run that no step would see."""
    text = f"has no effect, because the run is finished; to train more steps, type: {more}"
    if changed := [name for name in type(spec).model_fields if getattr(before, name) != getattr(spec, name)]:
        raise SpecError([Problem(name, text, COMMAND_LINE) for name in changed])


def read_status(folder: RunFolder) -> dict[str, object]:
    """status.json; empty where it is missing or unreadable: the checkpoints tell how far a run is."""
    try:
        return read_mapping(folder.status)
    except EnvironmentProblem as error:
        log.warning("%s; using the checkpoints to find the last step", error)
        return {}


def next_attempt(folder: RunFolder) -> int:
    """The number after that of the last recorded attempt; status.json may be lost."""
    last = read_status(folder).get("attempt")
    kept = [int(path.name) for path in folder.attempts.glob("*") if path.name.isdecimal()]
    return max([1, *kept, *([last] if isinstance(last, int) else [])]) + 1


def attempt(spec: JobSpec, folder: RunFolder, number: int, typed: Mapping[str, Any]) -> int:
    """Run attempt `number` in a folder that the caller has locked, and further attempts; returns 0.

    typed: the job as it was typed, which must be the same on all machines. Raises RunnerError.
    """

    def run(now: int) -> None:
        with _handle_slurm_signals(spec):
            _run(spec, folder, now, typed)

    run_attempts(spec, folder, number, run)
    return 0


def run_attempts(spec: JobSpec, folder: RunFolder, number: int, run: Callable[[int], None]) -> None:
    """Run attempts from `number` on, at most launch.attempts in all; raises the error of the last one."""
    last = number + spec.launch.attempts - 1
    while True:
        try:
            with status_of(folder, number):
                run(number)
            return
        except Interrupted as error:
            if is_upstream_run():
                raise
            more = labeled_line("continue", f"run resume {run_argument(folder)}")
            raise Interrupted(error.exit_code - 128, f"{error}\n{more}") from error
        except RunnerError as error:
            from runner.launch.exit_cause import is_final

            if number >= last or is_final(error):
                raise
            cause, *_ = str(error).splitlines()
        number += 1
        archive_attempt(folder, number, ())
        left = f"attempt {number} continues from the newest checkpoint"
        more = f"{last - number} more after it" if last > number else "the last one"
        Console(folder.log).message(f"attempt {number - 1} ended: {cause}; {left} ({more})", "warning")


def is_other_machine(spec: JobSpec) -> bool:
    """Whether machine 0 of the job, which creates the run folder, is another machine."""
    return bool(spec.launch.machine) and not is_launched_rank(os.environ)


def join_run(spec: JobSpec, typed: Mapping[str, Any]) -> int:
    """Join the job of machine 0 with this machine's devices; returns 0. Raises RunnerError."""
    from runner.launch.multi_node import join_node0

    refuse_unready([spec.device.preflight])
    with _handle_slurm_signals(spec), join_node0(spec, typed) as (machines, folder, number):
        _run_supervised(spec, folder, number, machines)
    return 0


def _run(spec: JobSpec, folder: RunFolder, number: int, typed: Mapping[str, Any]) -> None:
    if is_launched_rank(os.environ):
        from runner.launch import torchrun

        torchrun.run_rank0(spec, folder, number)
    elif spec.launch.machines > 1:
        from runner.launch.multi_node import gather_nodes

        with gather_nodes(spec, folder, number, typed) as machines:
            _run_supervised(spec, folder, number, machines)
    elif spec.launch.alone and spec.launch.attempts == 1:
        from runner.launch.cleanup_process import remove_scratch_at_end

        with remove_scratch_at_end(spec, folder, RankInfo()):
            Session(spec, folder, number).run()
    else:
        _run_supervised(spec, folder, number)


def _run_supervised(spec: JobSpec, folder: RunFolder, number: int, machines: PeerNodes | None = None) -> None:
    """Start this machine's processes, and watch them to their end."""
    from runner.launch.supervisor import Supervisor

    with closing(LocalLauncher(spec, machines)) as launcher:
        Supervisor(spec, folder, number, launcher, machines).run()


class LocalLauncher:
    """The `WorkerLauncher` of launch=local, on this machine."""

    def __init__(self, spec: JobSpec, machines: PeerNodes | None = None) -> None:
        """Raises EnvironmentProblem if devices are missing."""
        from runner.launch.cleanup_process import CleanupProcess
        from runner.launch.multi_node import LOOPBACK

        self._spec, self._machines = spec, machines
        self._cards = _local_cards(spec)
        self._own = None if machines is not None else socket.create_server((LOOPBACK, 0), backlog=512)
        self._cleanup = CleanupProcess() if spec.algorithm.needs_sampler else None

    def local_ranks(self) -> list[RankInfo]:
        """The ranks of this machine."""
        size = self._spec.launch.devices
        first = size * self._spec.launch.machine
        return [RankInfo(first + local, self._spec.launch.world, local, size) for local in range(size)]

    def rendezvous_address(self) -> tuple[str, int]:
        """Host and port of the ranks' store."""
        if self._machines is not None:
            return self._machines.store
        assert self._own is not None
        host, port = self._own.getsockname()
        return host, port

    def start(self, worker: WorkerSpec) -> LocalWorker:
        """Start a process. Raises StorageError, EnvironmentProblem."""
        from runner.launch.worker_process import LocalWorker

        listener = self._machines.listener if self._machines is not None else self._own
        handle = listener.fileno() if listener is not None and worker.hosts_store else None
        if self._cleanup is not None:
            self._cleanup.remove(*worker.scratch)
        own = {**without_rank_variables(os.environ), **self._common_environment(), **self._visible_cards(worker)}
        own |= worker.environment
        member = LocalWorker.start(worker, own, handle, self._cleanup)
        if self._own is not None and worker.hosts_store:
            self._own.close()  # rank 0 has it: after rank 0 exits, connections must fail at once
        return member

    def close(self) -> None:
        """Close the store's socket and clean up."""
        if self._own is not None:
            self._own.close()
        if self._cleanup is not None:
            self._cleanup.close()

    def _common_environment(self) -> Mapping[str, str]:
        """Variables of all processes on this machine."""
        from runner.launch.multi_node import LOOPBACK, address_towards, gloo_interface

        processes = self._spec.launch.devices + self._spec.launch.samplers
        found = {}
        if "OMP_NUM_THREADS" not in os.environ:
            found["OMP_NUM_THREADS"] = str(max(len(os.sched_getaffinity(0)) // processes, 1))
        if "GLOO_SOCKET_IFNAME" not in os.environ:  # in many containers the host name has no address
            found |= gloo_interface(LOOPBACK if self._machines is None else address_towards(self._machines.store[0]))
        return found

    def _visible_cards(self, worker: WorkerSpec) -> Mapping[str, str]:
        """The cards that are visible to a process: a rank sees all and uses that of its local rank."""
        variable = self._spec.device.kind.visible
        if worker.role == "rank" or variable is None or self._cards is None:
            return {}
        return {variable: ",".join(self._cards[number] for number in worker.cards)}


def _local_cards(spec: JobSpec) -> tuple[str, ...] | None:
    """Names of this machine's visible devices; None on the CPU or without samplers.

    Raises EnvironmentProblem if ranks and samplers need more devices.
    """
    there = spec.device.visible() if spec.launch.samplers else None
    wanted = spec.launch.devices + spec.launch.samplers
    if there is not None and len(there) < wanted:
        asked = f"launch.devices={spec.launch.devices} and launch.samplers={spec.launch.samplers} need {wanted} devices"
        found = f"this machine has {len(there)} ({', '.join(there) or 'none'})"
        raise EnvironmentProblem(f"{asked}, but {found}; type fewer, or list more in {spec.device.kind.visible}")
    return there
