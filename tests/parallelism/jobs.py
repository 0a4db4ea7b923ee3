"""Whole jobs, built from words as `run` builds them, in one process or on forked ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from runner import build
from runner.cli.job_builder import compose_job
from runner.core.auto_choices import Decisions
from runner.core.rank_info import RankInfo
from runner.core.signals import StopSignal
from runner.interfaces import BaseCallback, StepResult
from runner.launch.export import CardFacts, write_export
from runner.run_dir.folder import RunFolder
from runner.spec.job import JobSpec
from runner.tracker.text import MACHINE_METRICS
from runner.trainer.loop import run_loop
from tests.parallelism.forked import ranks
from tests.parallelism.zero_gradients import noting
from tests.ports import free_port


def spec_of(words: Sequence[str], size: int = 1) -> JobSpec:
    """The job of these words on so many ranks, with parallelism=ddp unless they say another."""
    said = any(word.startswith("parallelism=") for word in words)
    spread = [] if size == 1 else [*([] if said else ["parallelism=ddp"]), f"launch.devices={size}"]
    return compose_job([*words, *spread]).spec


def in_one(words: Sequence[str], root: Path) -> dict[str, Any]:
    """What a job comes to in one process; see `_played`."""
    root.mkdir(parents=True, exist_ok=True)
    return played(spec_of(words), RunFolder(root), RankInfo())


def on_ranks(size: int, words: Sequence[str], root: Path) -> list[dict[str, Any]]:
    """What it comes to on each of several ranks."""
    (root / "ranks").mkdir(parents=True, exist_ok=True)
    return ranks(size, _rank, spec_of(words, size), root, size, free_port(), join=False)


def _rank(rank: int, spec: JobSpec, root: Path, size: int, port: int) -> dict[str, Any]:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    return played(spec, RunFolder(root, rank), RankInfo(rank, size, rank, size))


class Numbers(BaseCallback):
    """Keeps what every step measured."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_step(self, end: StepResult) -> None:
        self.steps.append({name: value for name, value in end.values.items() if not name.startswith(MACHINE_METRICS)})


def played(spec: JobSpec, folder: RunFolder, place: RankInfo) -> dict[str, Any]:
    """`steps`: what each measured; `gradients`: of each role's first update; `weights`: of each role at the end;
    `export`: the tensors of the exported folder, on rank 0.
    """
    outlets = build.OutputSinks(step=(), samples=_drop, rollouts=_drop, say=_drop)
    store = build.build_store(spec, folder)
    built = build.build(spec, folder, store, Decisions(), StopSignal(), outlets, place)
    first: dict[str, Any] = {}
    for role, learner in built.job.learners.items():
        noting(f"{role}/", learner, first)
    numbers = Numbers()
    run_loop(replace(built.job, callbacks=[*built.job.callbacks, numbers]), 0)
    weights = {f"{role}/{n}": t.clone() for role, one in built.job.learners.items() for n, t in one.weights()}
    exported: dict[str, Any] = {}
    if place.is_rank0:
        write_export(built.model, folder.export, spec, CardFacts(spec.steps, {}, built.data.prompt_style))
        exported = {name: one for file in folder.export.glob("*.safetensors") for name, one in load_file(file).items()}
    else:
        built.model.save(None)
    built.world.close()
    return {"steps": numbers.steps, "gradients": first, "weights": weights, "export": exported}


def _drop(*_: Any) -> None:
    """Nobody reads it."""
