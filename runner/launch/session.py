"""One attempt at a run in one process, from setting its environment to its last messages.

environment that the device needs, before torch is imported
checkpoint ─▶ trackers ─▶ build ─▶ loop ─▶ export
└─ a signal ends it at once ─┘

Every rank of a job does the same; only rank 0 writes files, by `RunRecords`.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from runner.core.auto_choices import Decisions
from runner.core.errors import (
    DeadlineExceeded,
    EnvironmentProblem,
    Interrupted,
    OutOfMemory,
    Problem,
    RankLost,
    SpecError,
)
from runner.core.package import import_frozen
from runner.core.rank_info import RankInfo, is_connection_loss, is_timeout
from runner.core.signals import StopSignal, signal_name
from runner.device.process_setup import load_torch, set_environment
from runner.launch.export import CardFacts, write_export
from runner.launch.run_messages import (
    NO_EXAMPLE,
    ChatMarkers,
    console_logging,
    data_text,
    example_prompt,
    longer_schedule_note,
    plain_sample,
    ranks_text,
    run_facts,
)
from runner.launch.run_records import NullRecords, RunRecords, TrainingClientRecords, is_upstream_run, write_spec
from runner.run_dir.folder import RunFolder, display_path, run_argument
from runner.run_dir.manifest import check_spec_unchanged
from runner.spec.job import JobSpec
from runner.tracker.console import Console
from runner.tracker.text import count_noun, labeled_line

if TYPE_CHECKING:
    from runner.build import BuiltJob
    from runner.checkpoint.store import CheckpointStore, LoadedCheckpoint
    from runner.interfaces import Device, RankCollectives

COMPILER = ("torch._dynamo.", "torch._inductor.")  # modules of its errors
HOST_MEMORY = ("can't start new thread", "DefaultCPUAllocator: can't allocate memory")  # how errors say that it is full
WITHOUT_CALLBACKS = "'callbacks=[]'"  # how a run that a callback ended early is resumed


@dataclass(slots=True)
class Session:
    """An attempt at `spec` in `folder`, which the caller has locked; place: this process's rank.

    `attempt` counts from 1; every later one resumes.
    """

    spec: JobSpec
    folder: RunFolder
    attempt: int
    place: RankInfo = field(default_factory=RankInfo)
    progress: Callable[[int], None] = field(default=lambda step: None)  # called with the number of finished steps
    stop: StopSignal = field(default_factory=StopSignal)
    values: Mapping[str, float] = field(default_factory=dict)  # metrics of the newest step, for the model card
    markers: ChatMarkers | None = None  # of the chat template, if the data are conversations
    open_store: Callable[[], object] = field(default=lambda: None)  # called after torch is imported; kept until the end

    def run(self) -> None:
        """Run to the end. Raises RunnerError for every error with a message for the user."""
        with console_logging(self.folder.log, silent=not self.place.is_rank0) as console:
            self.stop.install()
            with translate_rank_errors(self.place):
                (self._serve if self.spec.algorithm.serves else self._run)(console)

    def _prepare(self, console: Console) -> tuple[RunRecords, object]:
        """Set the environment and import torch; the attempt's records, and what has to live as long as it."""
        console.message(f"folder   {display_path(self.folder.root)}")
        if self.place.size > 1:
            console.message(ranks_text(self.spec, self.place, self.folder.root))
        decide = Decisions(self.spec.strict)
        with self.stop.interrupt_immediately():
            set_environment(self.spec, decide)
            load_torch(self.spec.device.name)
            store = self.open_store()
        kind = RunRecords if self.place.is_rank0 else NullRecords
        return kind(self.spec, self.folder, self.attempt, decide), store

    def _serve(self, console: Console) -> None:
        """Serve clients of `run tinker` until a signal, or until tinker.command ends. Raises Interrupted."""
        records, store = self._prepare(console)
        with self.stop.interrupt_immediately(), translate_device_errors(self.spec):
            import_frozen("runner.build")
            from runner.tinker import server

            built = server.build_server(self.spec, self.folder, records.decide, self.place)
            records.describe(_device_facts(built.device), self._process_facts(built.world.world_peers))
        clients = TrainingClientRecords(self.spec, self.folder, records.decide, console)
        try:
            with translate_device_errors(self.spec):
                if self.place.is_rank0:
                    server.lead(self.spec, built, clients, console.message, self.stop)
                else:
                    server.follow(built.service, built.world)
        finally:
            lines = [line for model_id in list(clients.opened) for line in clients.close(model_id)]
        built.world.close()
        del store
        console.stop(lines if self.place.is_rank0 else [])
        if self.spec.tinker.command and self.stop.number is None:
            return
        number = self.stop.number or signal.SIGTERM
        raise Interrupted(
            number, f"{signal_name(number)}: the server stopped; clients continue from their saved states"
        )

    def _run(self, console: Console) -> None:
        records, store = self._prepare(console)
        ending = "failed"
        try:
            with self.stop.interrupt_immediately(), translate_device_errors(self.spec):
                built, first = self._build(records, console)
                records.describe(_device_facts(built.job.device), self._process_facts(built.world.world_peers))
            with translate_device_errors(self.spec):
                seconds, steps = self._loop(built, first, console)
            ending = "done"
        finally:
            tracker_lines = records.close(ending)
        lines = [*self._ending(built, seconds, steps), *tracker_lines]
        built.world.close()
        del store
        console.stop(lines if self.place.is_rank0 else [])

    def _build(self, records: RunRecords, console: Console) -> tuple[BuiltJob, int]:
        """The job restored from the newest checkpoint, and its next step; opens `records` on the way."""
        import_frozen("runner.build")  # with torch and transformers: folder, spec and status exist by now
        from runner import build

        store = build.build_store(self.spec, self.folder)
        loaded = self._load(store, records, console)
        first = 0 if loaded is None else loaded.step
        records.open(first, console)
        outlets = self._sinks(build.OutputSinks, records, console)
        built = build.build(self.spec, self.folder, store, records.decide, self.stop, outlets, self.place)
        build.refuse_different_steps(first, built.world.world_peers)
        self._keep_resolved_steps(built.spec, first, records, console)
        if loaded is not None:
            built.restore(loaded.state)
            self.values = loaded.metrics
        if built.data.prompt_style == "chat":
            self.markers = ChatMarkers.from_tokenizer(built.model.tokenizer, self.spec.chat)
        return built, first

    def _keep_resolved_steps(self, spec: JobSpec, first: int, records: RunRecords, console: Console) -> None:
        """Write the steps that `epochs` came to into spec.yaml, so that the run resumes with them."""
        if self.spec.epochs is None:
            return
        if spec.steps < first:
            text = f"{self.spec.epochs:g} epochs are {spec.steps} steps, but {first} are done; steps can only increase"
            raise SpecError([Problem("epochs", text)])
        if first and (note := longer_schedule_note(self.spec, spec)):
            console.message(note)
        self.spec = records.spec = spec
        if self.place.is_rank0:
            write_spec(self.folder, spec)

    def _load(self, store: CheckpointStore, records: RunRecords, console: Console) -> LoadedCheckpoint | None:
        """The newest valid checkpoint if this is a resume; later lines of the logs are moved to attempts/."""
        if self.attempt == 1:
            return None
        loaded = store.load(mapped=self.place.size > 1)  # a rank may need only a part
        step = 0 if loaded is None else loaded.step
        if loaded is not None:
            check_spec_unchanged(self.spec, loaded.state["identity"])
        records.truncate_after(step, console)
        if loaded is None:
            console.message("resume   no checkpoint was written yet: starting at step 0")
        else:
            console.message(f"resume   after step {step} of {self.spec.steps}")
        return loaded

    def _sinks(self, outlets: Any, records: RunRecords, console: Console) -> Any:
        def samples(step: int, rows: Sequence[Mapping[str, Any]]) -> None:
            records.log_samples(step, rows)
            for row in rows[:1]:
                console.sample(plain_sample(row, self.markers))

        def remember(step: int, values: Mapping[str, float]) -> None:
            self.values = dict(values)
            self.progress(step)

        sinks = (records.log, console.step, remember)
        more = {"samples": samples, "rollouts": records.log_samples, "say": console.message}
        return outlets(step=sinks, log_first=records.log, **more)

    def _loop(self, built: BuiltJob, first: int, console: Console) -> tuple[float, int]:
        """Run the loop; returns the seconds that it took and the number of finished steps."""
        from runner.trainer.loop import run_loop

        console.message(data_text(self.spec, len(built.data)))
        console.start(run_facts(self.spec, built.model) | {"device": built.job.device.name}, self.spec.steps)
        self.progress(first)
        begin = time.perf_counter()
        steps = run_loop(built.job, first)
        return time.perf_counter() - begin, steps

    def _ending(self, built: BuiltJob, seconds: float, steps: int) -> list[str]:
        lines = [labeled_line("done", f"{count_noun(steps, 'step')} in {seconds:.0f} s")]
        lines.append(labeled_line("report", display_path(self.folder.report)))  # the launcher writes it at the end
        if self.spec.checkpoint.export and not self.place.is_rank0:
            built.model.save(None)  # rank 0 writes, and may need this rank's shards
        elif self.spec.checkpoint.export:
            facts = CardFacts(steps, self.values, built.data.prompt_style)
            write_export(built.model, self.folder.export, self.spec, facts)
            lines.append(labeled_line("model", display_path(self.folder.export)))
        if is_upstream_run():
            return lines
        lines.append(labeled_line("try it", self._try_it(built)))
        more = f"steps={self.spec.steps * 2}" if steps == self.spec.steps else WITHOUT_CALLBACKS
        lines.append(labeled_line("continue", f"run resume {run_argument(self.folder)} {more}"))
        return lines

    def _process_facts(self, peers: RankCollectives) -> dict[str, Any]:
        """The manifest's record of the job's processes, rank by rank; collective."""
        own = {"host": socket.gethostname(), "pid": os.getpid(), "local_rank": self.place.local_rank}
        return {"ranks": peers.all_gather(own)}

    def _try_it(self, built: BuiltJob) -> str:
        """The command that uses the trained model."""
        from runner.interfaces import as_generative

        if as_generative(built.model) is None:
            path = display_path(self.folder.export)
            return f"as a reward: reward=model reward.path={path} (with algorithm=grpo or ppo)"
        own = self.spec.data.example_prompt()
        given = example_prompt(built.data.take(0, 1), built.model.tokenizer, self.markers)
        return f"run infer {run_argument(self.folder)} {given if own == NO_EXAMPLE else own}"


@contextmanager
def translate_rank_errors(place: RankInfo) -> Iterator[None]:
    """Raise RankLost or DeadlineExceeded for a library's error after another rank has ended or hangs."""
    try:
        yield
    except RuntimeError as error:
        first = (str(error).splitlines() or [""])[0]
        if place.size > 1 and is_connection_loss(str(error)):
            raise RankLost(f"{place} lost another rank: {first}") from error
        if place.size > 1 and is_timeout(str(error)):
            text = f"{place} waited for another rank longer than parallelism.timeout_s: {first}"
            raise DeadlineExceeded(text) from error
        raise


def _device_facts(device: Device) -> dict[str, Any]:
    """The manifest's record of the device: its name, and what exact results depend on."""
    return {"name": device.name, **device.describe()}


@contextmanager
def translate_device_errors(spec: JobSpec) -> Iterator[None]:
    """Raise OutOfMemory if memory is exhausted, EnvironmentProblem if torch cannot compile a layer."""
    import torch

    try:
        yield
    except (MemoryError, RuntimeError) as error:
        cause = getattr(error, "inner_exception", error)  # what torch's compiler failed with
        if isinstance(cause, torch.OutOfMemoryError):
            raise OutOfMemory(_memory_advice(spec, cause)) from error
        if spec.model.compile is not False and type(error).__module__.startswith(COMPILER):
            text = f"torch cannot compile a layer: {type(cause).__name__}: {(str(cause).splitlines() or [''])[0]}"
            raise EnvironmentProblem(f"{text}\n  type model.compile=false, also to resume the run") from error
        if isinstance(error, RuntimeError) and not any(words in str(error) for words in HOST_MEMORY):
            raise
        raise OutOfMemory(
            f"this process gets no more memory or threads: {str(error) or type(error).__name__}\n"
            "  raise the limits of the shell or the container (ulimit -v, ulimit -u), or use a smaller model"
        ) from error


def _memory_advice(spec: JobSpec, error: BaseException) -> str:
    now = spec.algorithm.micro_batch_tokens or "null: a line at the start has its number"
    return (
        f"the device's memory is exhausted: {str(error).splitlines()[0]}\n"
        f"  lower algorithm.micro_batch_tokens (now {now}; same update), or set model.gradient_checkpointing=true"
    )
