"""Checkpoints and exports of models whose layers lie in stages: those of the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from runner.core.auto_choices import Decisions
from runner.parallelism.config import FsdpConfig, MeshConfig, PpConfig, TpConfig
from runner.parallelism.mesh import Mesh
from runner.parallelism.parallel_context import ParallelContext
from runner.trainer.learner import LocalLearner
from tests.parallelism.forked import ranks
from tests.parallelism.test_fsdp import BOTH, made
from tests.parallelism.test_fsdp_checkpoint import close, files, store
from tests.parallelism.test_learning import Curved, given
from tests.parallelism.test_pipeline_parallel import learner
from tests.parallelism.worlds import alone, meshed

SLOW = pytest.mark.slow
Layout = tuple[MeshConfig, Mesh]
TWO: Layout = (PpConfig(), Mesh(pp=2))


def built(adapter: bool, layout: Layout | None) -> tuple[ParallelContext, LocalLearner]:
    world = alone() if layout is None else meshed(*layout)
    model = made("qwen3", adapter, num_hidden_layers=3, tie_word_embeddings=not adapter)
    if layout is not None:
        world.shard(model, Decisions())
    return world, learner(model, world)


def saved(rank: int, root: Path, adapter: bool, layout: Layout | None, start: bool, steps: int) -> None:
    """Go on from the newest checkpoint for some steps, and save."""
    world, one = built(adapter, layout)
    kept, first = store(root), 0
    kept.peers = world.world_peers
    if not start:
        loaded = kept.load(mapped=True)
        assert loaded is not None
        first = loaded.step
        one.load_state_dict(loaded.state["policy"])
    for step in range(first, first + steps):
        one.begin_step(step)
        one.forward_backward(given(step), Curved())
        one.optim_step()
    assert kept.save(first + steps, {"policy": one.state_dict()}, {"train/loss": 1.0}).is_dir()


@BOTH
def test_a_run_goes_on_in_stages_and_in_one_process(tmp_path: Path, adapter: bool) -> None:
    root = tmp_path / "many"
    saved(0, tmp_path / "alone", adapter, None, True, 3)
    ranks(2, saved, root, adapter, TWO, True, 1)
    saved(0, root, adapter, None, False, 1)
    ranks(2, saved, root, adapter, TWO, False, 1)
    close(files(root, 3), files(tmp_path / "alone", 3))


@SLOW
@BOTH
def test_any_layout_goes_on_from_any_other(tmp_path: Path, adapter: bool) -> None:
    root = tmp_path / "many"
    saved(0, tmp_path / "alone", adapter, None, True, 5)
    ranks(4, saved, root, adapter, (FsdpConfig(), Mesh(pp=2, dp_shard=2)), True, 1)
    ranks(2, saved, root, adapter, (TpConfig(), Mesh(tp=2)), False, 1)
    ranks(4, saved, root, adapter, (TpConfig(), Mesh(pp=2, tp=2)), False, 1)
    ranks(3, saved, root, adapter, (PpConfig(), Mesh(pp=3)), False, 1)
    ranks(2, saved, root, adapter, (FsdpConfig(), Mesh(dp_shard=2)), False, 1)
    close(files(root, 5), files(tmp_path / "alone", 5))


@pytest.mark.slow
def test_the_same_layout_goes_on_bit_for_bit(tmp_path: Path) -> None:
    ranks(2, saved, tmp_path / "through", True, TWO, True, 3)
    ranks(2, saved, tmp_path / "cut", True, TWO, True, 2)
    ranks(2, saved, tmp_path / "cut", True, TWO, False, 1)
    one, other = files(tmp_path / "through", 3), files(tmp_path / "cut", 3)
    assert all(torch.equal(one[name], other[name]) for name in one) and one.keys() == other.keys()


@pytest.mark.parametrize(
    "layout", [TWO, pytest.param((FsdpConfig(), Mesh(pp=2, dp_shard=2)), marks=SLOW)], ids=["stages", "in groups"]
)
def test_what_stages_write_is_what_one_process_would(tmp_path: Path, layout: Layout) -> None:
    def work(rank: int) -> None:
        world, one = built(False, layout)
        loaded = store(tmp_path / "one").load(mapped=True)
        assert loaded is not None
        one.load_state_dict(loaded.state["policy"])
        kept = store(tmp_path / "many")
        kept.peers = world.world_peers
        kept.save(1, {"policy": one.state_dict()}, {})

    saved(0, tmp_path / "one", False, None, True, 1)
    ranks(layout[1].pp * layout[1].dp_shard, work)
    for name in ("policy.safetensors", "state.json"):
        one, many = (tmp_path / kind / "step-00000001" / name for kind in ("one", "many"))
        assert one.read_bytes() == many.read_bytes(), name


@BOTH
def test_the_export_is_that_of_the_whole_model(tmp_path: Path, adapter: bool) -> None:
    def model() -> Any:
        return made("qwen3", adapter, num_hidden_layers=3, tie_word_embeddings=True)

    def work(rank: int) -> None:
        world, one = meshed(*TWO), model()
        world.shard(one, Decisions())
        one.save(tmp_path / "several" if rank == 0 else None)

    model().save(tmp_path / "one")
    ranks(2, work)
    name = "adapter_model.safetensors" if adapter else "model.safetensors"
    assert (tmp_path / "several" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()
