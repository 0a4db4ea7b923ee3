"""One attempt at a run, from its status to what its end says.

status: running ─▶ checkpoint ─▶ trackers ─▶ build ─▶ loop ─▶ export ─▶ status: done
                   └─ a signal ends it at once ─┘
                       └────── any error ──────▶ status: failed, with the exit code
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from runner import manifest
from runner.decisions import Decisions
from runner.errors import Interrupted, OutOfMemory, RunnerError
from runner.folder import RunFolder, is_latest, shown, write_json
from runner.identity import refuse_changed_spec
from runner.launch.export import write_export
from runner.launch.screen import on_screen
from runner.launch.stage import is_stage
from runner.launch.surroundings import load_torch, set_environment
from runner.launch.words import NO_EXAMPLE, Turn, amount, example, plain_sample, title
from runner.registry import default_registry
from runner.signals import StopSignal
from runner.spec.job import JobSpec
from runner.tracker.console import Console
from runner.tracker.jsonl import JsonlTracker, cut_back, holes
from runner.tracker.text import counted

if TYPE_CHECKING:
    from runner.build import Built
    from runner.checkpoint.store import CheckpointStore, Loaded
    from runner.protocols import Tracker


@dataclass(slots=True)
class Session:
    """An attempt at `spec` in `folder`, which the caller has locked.

    `attempt` counts from 1; every later one resumes.
    """

    spec: JobSpec
    folder: RunFolder
    attempt: int
    stop: StopSignal = field(default_factory=StopSignal)
    values: Mapping[str, float] = field(default_factory=dict)  # the newest step's numbers, for the model card
    made_of: dict[str, Any] = field(default_factory=dict)  # the manifest, but for what was decided
    turn: Turn | None = None  # what stands around a user's message, where the data are conversations

    def run(self) -> int:
        """Run to the end; returns 0. Raises RunnerError for everything that is worded for the user."""
        try:
            with on_screen(self.folder.log) as console, self._status():
                self.stop.install()
                self._run(console)
        except Interrupted as error:
            if is_stage():
                raise
            raise Interrupted(error.exit_code - 128, f"{error}\ngo on    run resume {self._name()}") from error
        return 0

    def _name(self) -> str:
        """How the run is called in a command."""
        return "latest" if is_latest(self.folder) else shown(self.folder.root)

    @contextmanager
    def _status(self) -> Iterator[None]:
        self._write_status("running")
        try:
            yield
        except Interrupted as error:
            self._write_status("interrupted", error.exit_code, str(error))
            raise
        except RunnerError as error:
            self._write_status("failed", error.exit_code, str(error))
            raise
        except BaseException as error:
            self._write_status("failed", 1, f"{type(error).__name__}: {error}")
            raise
        self._write_status("done", 0)

    def _write_status(self, state: str, exit_code: int | None = None, error: str | None = None) -> None:
        record = {"state": state, "attempt": self.attempt, "pid": os.getpid(), "exit_code": exit_code, "error": error}
        write_json(self.folder.status, record)

    def _run(self, console: Console) -> None:
        console.message(f"folder   {shown(self.folder.root)}")
        decide = Decisions(self.spec.strict)
        with self.stop.at_once():
            set_environment(self.spec, decide)
            load_torch(self.spec.device.name)
        trackers: list[Tracker] = []
        ending = "failed"
        try:
            with self.stop.at_once(), memory_errors(self.spec):
                built, first = self._build(decide, trackers, console)
                self._write_manifest(decide)
            with memory_errors(self.spec):
                seconds = self._loop(built, first, console)
            ending = "done"
        finally:
            tracker_lines = [line for tracker in trackers for line in tracker.finish(ending)]
            if self.made_of:  # again: what a tracker had to decide comes out while the run goes on
                self._write_manifest(decide)
        console.stop([*self._ending(built, seconds), *tracker_lines])

    def _build(self, decide: Decisions, trackers: list[Tracker], console: Console) -> tuple[Built, int]:
        """The job, at the state of the newest checkpoint, and the step it goes on at; fills `trackers` on the way."""
        from runner import build  # torch is imported here: folder, spec and status exist by now

        store = build.build_store(self.spec, self.folder)
        loaded = self._load(store, console)
        first = 0 if loaded is None else loaded.step
        trackers.append(JsonlTracker(self.folder))
        trackers.append(self._tracker(first, decide, console))
        outlets = self._outlets(build.Outlets, trackers, console)
        built = build.build(self.spec, self.folder, store, decide, self.stop, outlets)
        if loaded is not None:
            built.restore(loaded.state)
            self.values = loaded.metrics
        self.turn = Turn.of(built.model.tokenizer) if built.data.style == "chat" else None
        self.made_of = manifest.collect(self.spec.model_dump(mode="json"), _device(built))
        return built, first

    def _load(self, store: CheckpointStore, console: Console) -> Loaded | None:
        """The newest whole checkpoint, if this is a resume; what was written after it is cut away and kept."""
        if self.attempt == 1:
            return None
        loaded = store.load()
        step = 0 if loaded is None else loaded.step
        if loaded is not None:
            refuse_changed_spec(self.spec, loaded.state["identity"])
        cut_back(self.folder, step, self.attempt)
        if damage := holes(self.folder, step):
            console.message(f"{shown(self.folder.metrics)} is damaged: {damage}", "warning")
        if loaded is None:
            console.message("resume   no checkpoint was written yet: starting at step 0")
        else:
            console.message(f"resume   after step {step} of {self.spec.steps}")
        return loaded

    def _tracker(self, first: int, decide: Decisions, console: Console) -> Tracker:
        tracker: Tracker = default_registry().factory(self.spec.tracker)(
            self.spec.tracker,
            folder=self.folder,
            spec=self.spec.model_dump(mode="json"),
            run_id=f"{self.folder.root.parent.name}-{self.folder.root.name}",
            name=self.folder.root.name,
            first_step=first,
            console=console,
            decide=decide,
        )
        return tracker

    def _outlets(self, outlets: Any, trackers: Sequence[Tracker], console: Console) -> Any:
        def rollouts(step: int, rows: Sequence[Mapping[str, Any]]) -> None:
            for tracker in trackers:
                tracker.samples(step, rows)

        def samples(step: int, rows: Sequence[Mapping[str, Any]]) -> None:
            rollouts(step, rows)
            for row in rows[:1]:
                console.sample(plain_sample(row, self.turn))

        def remember(step: int, values: Mapping[str, float]) -> None:
            self.values = dict(values)

        sinks = (*(tracker.log for tracker in trackers), console.step, remember)
        return outlets(step=sinks, samples=samples, rollouts=rollouts, say=console.message)

    def _write_manifest(self, decide: Decisions) -> None:
        write_json(self.folder.manifest, self.made_of | manifest.redacted(decide.records()))

    def _loop(self, built: Built, first: int, console: Console) -> float:
        from runner.loop import run

        console.message(amount(self.spec, len(built.data)))
        console.start(title(self.spec, built.model) | {"device": built.job.device.name}, self.spec.steps)
        begin = time.perf_counter()
        run(built.job, first)
        return time.perf_counter() - begin

    def _ending(self, built: Built, seconds: float) -> list[str]:
        lines = [f"done     {counted(self.spec.steps, 'step')} in {seconds:.0f} s"]
        if self.spec.checkpoint.export:
            write_export(built.model, self.folder.export, self.spec, self.spec.steps, self.values)
            lines.append(f"model    {shown(self.folder.export)}")
        if is_stage():
            return lines
        lines.append(f"try it   {self._try_it(built)}")
        lines.append(f"go on    run resume {self._name()} steps={self.spec.steps * 2}")
        return lines

    def _try_it(self, built: Built) -> str:
        """The command that uses what was made."""
        if not hasattr(built.model, "stream"):
            return f"as a reward: reward=model reward.path={shown(self.folder.export)} (with algorithm=grpo or ppo)"
        own = self.spec.data.example()
        given = example(built.data.take(0, 1), built.model.tokenizer, self.turn)
        return f"run infer {self._name()} {given if own == NO_EXAMPLE else own}"


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
