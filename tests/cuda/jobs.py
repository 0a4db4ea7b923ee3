"""The first mini-batch of a job, built from words as `run` builds it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runner import build
from runner.core.auto_choices import Decisions
from runner.core.batch import Batch
from runner.core.signals import StopSignal
from runner.run_dir.folder import RunFolder
from runner.trainer.loop import TrainingJob
from tests.parallelism.jobs import spec_of

SMALL = (
    "init_from=null",
    "tracker=none",
    "algorithm.batch_size=4",
    "data.items=32",
    "data.held_out=4",
    "model.hidden_size=64",
    "model.intermediate_size=64",
    "model.layers=2",
    "algorithm.micro_batch_tokens=8",  # each item runs alone
)


def small(*words: str) -> tuple[str, ...]:
    """A command's words, and of SMALL those whose options they do not give."""
    given = {word.partition("=")[0] for word in words}
    return *words, *(word for word in SMALL if word.partition("=")[0] not in given)


def first_mini_batch(words: Sequence[str], folder: Path) -> tuple[TrainingJob, Batch]:
    """A built job of one process, whose learners are at its first step, and what they learn from there. All else that
    the job holds is closed."""
    spec, own = spec_of(small(*words)), RunFolder(folder)
    outlets = build.OutputSinks(step=(), samples=_drop, rollouts=_drop, say=_drop)
    job = build.build(spec, own, build.build_store(spec, own), Decisions(), StopSignal(), outlets).job
    with job.feed:
        job.publish(0)
        job.feed.start(0)
        batch = next(iter(job.algorithm.prepare(job.feed.take(0), job.models)))
    for close in job.closing:
        close()
    for learner in job.learners.values():
        learner.begin_step(0)
    return job, batch


def _drop(*_: Any) -> None:
    """Nobody reads it."""
