"""Whole jobs that save in the background: byte for byte the checkpoints of those that wait for the disk."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from runner.checkpoint import format
from runner.core.errors import RunnerError
from tests.parallelism.forked import ranks
from tests.parallelism.jobs import in_one, on_ranks
from tests.parallelism.test_jobs import REWARDED, SAMPLED, SMALL

WORDS = [word for word in SMALL.split() if not word.startswith(("checkpoint.", "optimizer", "steps="))]
BACKGROUND = "checkpoint.asynchronous=true"
SAVING = "checkpoint.every=1 checkpoint.keep=9 steps=4"
JOBS = {
    "sft": "algorithm=sft algorithm.batch_size=6 evaluation.every=0",
    "ahead": f"algorithm=grpo algorithm.group_size=4 algorithm.lag=1 evaluation.every=2 {SAMPLED} {REWARDED}",
}


def checkpoints(size: int, words: str, root: Path) -> dict[str, bytes]:
    """What a job leaves, but for the manifests, which tell the time."""
    said = [*WORDS, *words.split(), *SAVING.split()]
    _ = in_one(said, root) if size == 1 else on_ranks(size, said, root)
    folder = root / "checkpoints"
    assert sorted(one.name for one in folder.iterdir()) == [f"step-{step:08d}" for step in range(1, 5)]
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "MANIFEST.json")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize(
    ("size", "job", "spread"),
    [
        (1, "sft", ""),
        (2, "sft", "parallelism=fsdp"),
        pytest.param(2, "sft", "parallelism=tp", marks=pytest.mark.slow),
        pytest.param(2, "sft", "parallelism=pp", marks=pytest.mark.slow),
        pytest.param(2, "ahead", "parallelism=ddp", marks=pytest.mark.slow),
        pytest.param(4, "ahead", "parallelism=hsdp", marks=pytest.mark.slow),
    ],
)
def test_a_job_leaves_the_same_checkpoints_as_one_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, job: str, spread: str
) -> None:
    monkeypatch.chdir(tmp_path)
    words = f"{JOBS[job]} {spread}"
    waiting = checkpoints(size, words, tmp_path / "waiting")
    assert checkpoints(size, f"{words} {BACKGROUND}", tmp_path / "meanwhile") == waiting


def ended(words: str, root: Path, slowness_s: float = 0.0) -> tuple[str, list[str]]:
    """How a job of one process ends, in a process of its own, and the checkpoints that are there at that moment."""
    describe = format.build_manifest

    def slowly(*arguments: Any) -> Any:
        time.sleep(slowness_s)
        return describe(*arguments)

    def work(rank: int) -> tuple[str, list[str]]:
        format.build_manifest = slowly
        try:
            in_one([*WORDS, *words.split(), *SAVING.split(), BACKGROUND], root)
        except RunnerError as error:
            return f"{type(error).__name__}: {error}", sorted(path.name for path in (root / "checkpoints").iterdir())
        return "", []

    return ranks(1, work, join=False)[0]


def test_an_error_of_training_waits_for_the_checkpoint_that_is_being_written(tmp_path: Path) -> None:
    said, left = ended(f"{JOBS['sft']} optimizer.lr=1e20", tmp_path, slowness_s=0.5)
    assert said.startswith("TrainingDiverged: step 2: the loss is")
    assert left == ["step-00000001"]


def test_a_full_disk_ends_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNNER_FAILPOINT", "checkpoint.mid_write:ENOSPC")
    said, left = ended(JOBS["sft"], tmp_path)
    assert re.match("StorageError: checkpoint of step 1 in .*: the disk is full; needed", said)
    assert left == []
