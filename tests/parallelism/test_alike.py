"""Ranks that would not begin with the same are refused, on all of them, whatever the layout."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from runner import build
from runner.core.auto_choices import Decisions
from runner.core.errors import CheckpointError, RunnerError
from runner.core.rank_info import RankInfo
from runner.core.signals import StopSignal
from runner.parallelism.parallel_context import ParallelContext
from runner.run_dir.folder import RunFolder
from tests.algorithm.preferences import model
from tests.model import zoo
from tests.parallelism.forked import ranks
from tests.parallelism.jobs import spec_of
from tests.parallelism.worlds import on_ranks
from tests.ports import free_port

JOB = "algorithm=sft data=demo steps=1 tracker=none evaluation.every=0 model=hf"


def begun(rank: int, words: Sequence[str], root: Path, port: int) -> tuple[str, str]:
    """What each of two ranks, with words of its own, ends with when it builds its job: the kind of error, and words."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    spec, folder = spec_of(words[rank].split(), 2), RunFolder(root, rank)
    outlets = build.OutputSinks(step=(), samples=print, rollouts=print, say=print)
    store = build.build_store(spec, folder)
    try:
        build.build(spec, folder, store, Decisions(), StopSignal(), outlets, RankInfo(rank, 2, rank, 2))
    except RunnerError as error:
        return type(error).__name__, str(error)
    return "", ""


def together(words: Sequence[str], root: Path) -> list[tuple[str, str]]:
    return ranks(2, begun, words, root, free_port(), join=False)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, "config.json: rope_parameters is"),
        (
            {"num_hidden_layers": 1, "layer_types": ["full_attention"]},
            "module module.model.layers.1 is Qwen2DecoderLayer on rank 0 and not there on rank",
        ),
    ],
    ids=["options", "structure"],
)
def test_another_model_on_one_rank(change: dict[str, Any], what: str, workdir: Path) -> None:
    for name in ("here", "there"):
        model(1).save(workdir / name)
    described = workdir / "there" / "config.json"
    described.write_text(json.dumps(json.loads(described.read_text()) | change))
    words = [f"{JOB} model.path={workdir / name} parallelism=fsdp" for name in ("here", "there")]
    for kind, said in together(words, workdir):
        assert kind == "EnvironmentProblem" and "ranks 0 and 1 build different models" in said and what in said


def test_other_data_on_one_rank(workdir: Path) -> None:
    model(1).save(workdir / "model")
    words = [f"{JOB} model.path={workdir / 'model'} data.items={items}" for items in (64, 65)]
    for kind, said in together(words, workdir):
        assert kind == "DataError" and said.startswith("rank 1 has other data than rank 0")


@pytest.mark.slow
def test_a_teacher_of_another_layout_in_pieces(workdir: Path) -> None:
    model(1).save(workdir / "model")
    zoo.causal("bloom").save(workdir / "teacher")  # which falls back to padded rows
    job = JOB.replace("=sft", "=distill") + f" algorithm.teacher={workdir}/teacher model.path={workdir}/model"
    for kind, said in together([f"{job} parallelism=fsdp"] * 2, workdir):
        assert kind == "SpecError" and "algorithm.teacher uses the padded layout and the model the packed one" in said
    assert together([f"{job} parallelism=fsdp model.batch_layout=padded"] * 2, workdir) == [("", "")] * 2


def going_on(world: ParallelContext, steps: Sequence[int]) -> str:
    try:
        build.refuse_different_steps(steps[world.place.rank], world.world_peers)
    except CheckpointError as error:
        return str(error).splitlines()[0]
    return ""


def test_another_checkpoint_on_one_rank() -> None:
    wanted = "ranks find different newest checkpoints: of steps 20, 20, 10"
    assert on_ranks(3, going_on, (20, 20, 10)) == [wanted] * 3
    assert on_ranks(2, going_on, (20, 20)) == ["", ""]
