"""One attempt at a run in one process, from its environment to what its end says.

environment that the device wants, before torch is imported
checkpoint ─▶ trackers ─▶ build ─▶ loop ─▶ export
└─ a signal ends it at once ─┘

Every rank of a job on several devices does the same; what is written, `Records` writes, of rank 0.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from runner.core.auto_choices import Decisions
from runner.core.errors import DeadlineExceeded, EnvironmentProblem, OutOfMemory, RankLost
from runner.core.imports import import_frozen
from runner.core.rank_info import Place, tells_of_delay, tells_of_loss
from runner.core.signals import StopSignal
from runner.device.backend import leave_out
from runner.device.kinds import NPU
from runner.device.presets import npu_objection, resolve
from runner.launch.export import write_export
from runner.launch.records import NoRecords, Records
from runner.launch.stage import is_stage
from runner.launch.words import NO_EXAMPLE, Turn, amount, example, on_screen, plain_sample, ranks, title
from runner.run_dir.folder import RunFolder, is_latest, shown
from runner.run_dir.resume_compatibility import refuse_changed_spec
from runner.spec.job import JobSpec
from runner.tracker.console import Console
from runner.tracker.text import counted, labeled

if TYPE_CHECKING:
    from runner.build import Built
    from runner.checkpoint.store import CheckpointStore, Loaded


@dataclass(slots=True)
class Session:
    """An attempt at `spec` in `folder`, which the caller has locked, at this `place` of the job.

    `attempt` counts from 1; every later one resumes.
    """

    spec: JobSpec
    folder: RunFolder
    attempt: int
    place: Place = field(default_factory=Place)
    progress: Callable[[int], None] = field(default=lambda step: None)  # so many steps are finished
    stop: StopSignal = field(default_factory=StopSignal)
    values: Mapping[str, float] = field(default_factory=dict)  # the newest step's numbers, for the model card
    turn: Turn | None = None  # what stands around a user's message, where the data are conversations
    meet: Callable[[], object] = field(default=lambda: None)  # called with torch there; the result is held to the end

    def run(self) -> None:
        """Run to the end. Raises RunnerError for everything that is worded for the user."""
        with on_screen(self.folder.log, silent=not self.place.leads) as console:
            self.stop.install()
            with lost_ranks(self.place):
                self._run(console)

    def _run(self, console: Console) -> None:
        console.message(f"folder   {shown(self.folder.root)}")
        if self.place.size > 1:
            console.message(ranks(self.spec, self.place, self.folder.root))
        decide = Decisions(self.spec.strict)
        with self.stop.at_once():
            set_environment(self.spec, decide)
            load_torch(self.spec.device.name)
            held = self.meet()
        kind = Records if self.place.leads else NoRecords
        records = kind(self.spec, self.folder, self.attempt, decide)
        ending = "failed"
        try:
            with self.stop.at_once(), memory_errors(self.spec):
                built, first = self._build(records, console)
                records.describe(_device(built), _processes(built))
            with memory_errors(self.spec):
                seconds = self._loop(built, first, console)
            ending = "done"
        finally:
            tracker_lines = records.close(ending)
        lines = [*self._ending(built, seconds), *tracker_lines]
        built.world.close()
        del held
        console.stop(lines if self.place.leads else [])

    def _build(self, records: Records, console: Console) -> tuple[Built, int]:
        """The job, at the state of the newest checkpoint, and the step it goes on at; opens `records` on the way."""
        import_frozen("runner.build")  # with torch and transformers: folder, spec and status exist by now
        from runner import build

        store = build.build_store(self.spec, self.folder)
        loaded = self._load(store, records, console)
        first = 0 if loaded is None else loaded.step
        records.open(first, console)
        outlets = self._outlets(build.Outlets, records, console)
        built = build.build(self.spec, self.folder, store, records.decide, self.stop, outlets, self.place)
        build.refuse_different_steps(first, built.world.everyone)
        if loaded is not None:
            built.restore(loaded.state)
            self.values = loaded.metrics
        self.turn = Turn.of(built.model.tokenizer) if built.data.style == "chat" else None
        return built, first

    def _load(self, store: CheckpointStore, records: Records, console: Console) -> Loaded | None:
        """The newest whole checkpoint, if this is a resume; what was written after it is cut away and kept."""
        if self.attempt == 1:
            return None
        loaded = store.load(mapped=self.place.size > 1)  # of which a rank may need a part
        step = 0 if loaded is None else loaded.step
        if loaded is not None:
            refuse_changed_spec(self.spec, loaded.state["identity"])
        records.cut_back(step, console)
        if loaded is None:
            console.message("resume   no checkpoint was written yet: starting at step 0")
        else:
            console.message(f"resume   after step {step} of {self.spec.steps}")
        return loaded

    def _outlets(self, outlets: Any, records: Records, console: Console) -> Any:
        def samples(step: int, rows: Sequence[Mapping[str, Any]]) -> None:
            records.samples(step, rows)
            for row in rows[:1]:
                console.sample(plain_sample(row, self.turn))

        def remember(step: int, values: Mapping[str, float]) -> None:
            self.values = dict(values)
            self.progress(step)

        sinks = (records.log, console.step, remember)
        return outlets(step=sinks, samples=samples, rollouts=records.samples, say=console.message)

    def _loop(self, built: Built, first: int, console: Console) -> float:
        from runner.trainer.loop import run

        console.message(amount(self.spec, len(built.data)))
        console.start(title(self.spec, built.model) | {"device": built.job.device.name}, self.spec.steps)
        self.progress(first)
        begin = time.perf_counter()
        run(built.job, first)
        return time.perf_counter() - begin

    def _ending(self, built: Built, seconds: float) -> list[str]:
        lines = [labeled("done", f"{counted(self.spec.steps, 'step')} in {seconds:.0f} s")]
        lines.append(labeled("report", shown(self.folder.report)))  # which whoever started the ranks writes at the end
        if self.spec.checkpoint.export and not self.place.leads:
            built.model.save(None)  # rank 0 writes, and may need this rank's pieces
        elif self.spec.checkpoint.export:
            write_export(built.model, self.folder.export, self.spec, self.spec.steps, self.values)
            lines.append(labeled("model", shown(self.folder.export)))
        if is_stage():
            return lines
        lines.append(labeled("try it", self._try_it(built)))
        lines.append(labeled("continue", f"run resume {called(self.folder)} steps={self.spec.steps * 2}"))
        return lines

    def _try_it(self, built: Built) -> str:
        """The command that uses what was made."""
        if not hasattr(built.model, "stream"):
            return f"as a reward: reward=model reward.path={shown(self.folder.export)} (with algorithm=grpo or ppo)"
        own = self.spec.data.example()
        given = example(built.data.take(0, 1), built.model.tokenizer, self.turn)
        return f"run infer {called(self.folder)} {given if own == NO_EXAMPLE else own}"


def called(folder: RunFolder) -> str:
    """How a run is called in a command."""
    return "latest" if is_latest(folder) else shown(folder.root)


@contextmanager
def lost_ranks(place: Place) -> Iterator[None]:
    """Word what the libraries between ranks raise where another rank is gone, or does not answer. Raises RankLost,
    DeadlineExceeded."""
    try:
        yield
    except RuntimeError as error:
        first = (str(error).splitlines() or [""])[0]
        if place.size > 1 and tells_of_loss(str(error)):
            raise RankLost(f"{place} lost another rank: {first}") from error
        if place.size > 1 and tells_of_delay(str(error)):
            text = f"{place} waited for another rank longer than parallelism.timeout_s: {first}"
            raise DeadlineExceeded(text) from error
        raise


def _processes(built: Built) -> dict[str, Any]:
    """What the manifest says of the job's processes, rank by rank, which all of them are asked for."""
    own = {"host": socket.gethostname(), "pid": os.getpid(), "local_rank": built.world.place.local_rank}
    return {"ranks": built.world.everyone.gather(own)}


def _device(built: Built) -> dict[str, Any]:
    """What the manifest says of the device: the name that `device=` has, and what exactness depends on."""
    return {"name": built.job.device.name, **built.job.device.describe()}


@contextmanager
def memory_errors(spec: JobSpec) -> Iterator[None]:
    """Word an exhausted device memory."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            f"the device's memory is exhausted: {str(error).splitlines()[0]}\n"
            f"  lower algorithm.micro_batch_tokens (now {spec.algorithm.micro_batch_tokens}; same update), "
            "or set model.gradient_checkpointing=true"
        ) from error


def set_environment(spec: JobSpec, decide: Decisions) -> None:
    """Set what the device's presets ask for and the user has not set; the manifest keeps what is then in force.

    A torch_npu that the device has no use for is left out of the process: without CANN it breaks `import torch`.
    Raises EnvironmentProblem if the device cannot work and nobody could see that before, if torch_npu would refuse what
    the user set, or if HCCL's timeouts, the user's and the preset's together, contradict one another.
    """
    if not spec.launch.here:
        spec.device.preflight()
    presets = spec.device.environment(spec)
    found = resolve(presets, dict(os.environ))
    for name, (value, variable) in found.kept.items():
        decide.state(f"environment.{name}", value, f"yours; not {variable.value}: {variable.reason}")
    os.environ.update({name: variable.value for name, variable in found.set.items()})
    if found.set:
        late = "; too late for what torch reads at its import" if "torch" in sys.modules else ""
        words = " ".join(f"{name}={variable.value}" for name, variable in found.set.items())
        decide.state("environment", " + ".join(preset.name for preset in presets), words + late)
    if left_out := leave_out(spec.device.name, spec.device.kind):
        decide.state("environment.torch_npu", "left out of this process", left_out)
    if spec.device.kind is NPU and (objection := npu_objection(os.environ)):
        raise EnvironmentProblem(f"device={spec.device.name}: {objection}")
    spec.device.enter()


def load_torch(device: str) -> None:
    """Import torch. Raises EnvironmentProblem where that fails, as it does if torch_npu does not fit torch or CANN."""
    try:
        import_frozen("torch")
    except (ImportError, OSError, RuntimeError) as error:
        cause = f"{error} (from {type(error.__cause__).__name__}: {error.__cause__})" if error.__cause__ else str(error)
        raise EnvironmentProblem(f"import torch fails: {cause}\n  what is wrong: run doctor device={device}") from error
