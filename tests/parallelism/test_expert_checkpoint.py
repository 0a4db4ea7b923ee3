"""Checkpoints and exports of models whose experts lie on several ranks: those of the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from runner.checkpoint.config import SafetensorsConfig
from runner.checkpoint.store import CheckpointStore
from runner.core.auto_choices import Decisions
from runner.parallelism.config import MeshConfig
from runner.parallelism.mesh import Mesh
from runner.parallelism.parallel_context import ParallelContext
from runner.trainer.learner import LocalLearner
from tests.parallelism.forked import ranks
from tests.parallelism.test_expert_parallel import EP2, LAYOUTS, SLOW, moe
from tests.parallelism.test_fsdp import CPU, part
from tests.parallelism.test_fsdp_checkpoint import close, files, store
from tests.parallelism.worlds import alone, meshed

Layout = tuple[MeshConfig, Mesh] | None  # None = one process


def learner(layout: Layout) -> tuple[LocalLearner, ParallelContext]:
    world, model = alone() if layout is None else meshed(*layout), moe(False)
    if layout is not None:
        world.shard(model, Decisions())
    optimizer = torch.optim.AdamW(model.trainable().values(), lr=1e-3, eps=1e-6, fused=True)
    options: dict[str, Any] = {"lr": 1e-3, "clip_norm": 1.0, "factor": lambda step: 1.0, "budget": 10**6, "seed": 0}
    return LocalLearner(model, optimizer, device=CPU, gradients=world.gradient_reducer(model), **options), world


def steps(one: LocalLearner, world: ParallelContext, count: int) -> None:
    batch = part(world.peers.rank, world.peers.size)
    for _ in range(count):
        total, _ = one.model.linear_loss(batch, -batch.tokens["weight"] / 50)
        one._backward(total, is_last=True)
        one.optim_step()


def saved(rank: int, root: Path, layout: Layout, start: bool, count: int) -> None:
    """Go on from the newest checkpoint for some steps, and save."""
    (one, world), kept, first = learner(layout), store(root), 0
    if not start:
        loaded = kept.load(mapped=True)
        assert loaded is not None
        first = loaded.step
        one.load_state_dict(loaded.state["policy"])
    steps(one, world, count)
    assert kept.save(first + count, {"policy": one.state_dict()}, {"train/loss": 1.0}).is_dir()


def test_any_layout_goes_on_from_any_other(tmp_path: Path) -> None:
    saved(0, tmp_path / "alone", None, True, 3)
    root = tmp_path / "many"
    ranks(2, saved, root, EP2, True, 1)
    saved(0, root, None, False, 1)
    ranks(2, saved, root, EP2, False, 1)
    close(files(root, 3), files(tmp_path / "alone", 3))


@SLOW
def test_more_layouts_go_on_from_one_another(tmp_path: Path) -> None:
    saved(0, tmp_path / "alone", None, True, 5)
    root = tmp_path / "many"
    ranks(4, saved, root, LAYOUTS["ep4"], True, 1)
    ranks(4, saved, root, LAYOUTS["fsdp, sharded experts"], False, 1)
    ranks(4, saved, root, LAYOUTS["hsdp"], False, 1)
    ranks(4, saved, root, LAYOUTS["tp, fsdp"], False, 1)
    ranks(4, saved, root, LAYOUTS["tp"], False, 1)
    close(files(root, 5), files(tmp_path / "alone", 5))


@pytest.mark.parametrize("layout", [pytest.param(name, marks=[] if name == "ddp" else SLOW) for name in LAYOUTS])
def test_what_many_ranks_write_is_what_one_would(tmp_path: Path, layout: str) -> None:
    def work(rank: int) -> None:
        one, world = learner(LAYOUTS[layout])
        steps(one, world, 1)
        state = one.state_dict()
        store(tmp_path / "pieces").save(1, {"policy": state}, {})
        whole = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in state["tensors"].items()}
        if rank == 0:
            single = CheckpointStore(SafetensorsConfig(), root=tmp_path / "whole", report=lambda _: None)
            single.save(1, {"policy": {**state, "tensors": whole}}, {})

    ranks(LAYOUTS[layout][1].world_size, work)
    one, other = (tmp_path / kind / "step-00000001" / "policy.safetensors" for kind in ("pieces", "whole"))
    assert one.read_bytes() == other.read_bytes()


@SLOW
def test_the_same_layout_goes_on_bit_for_bit(tmp_path: Path) -> None:
    ranks(2, saved, tmp_path / "through", EP2, True, 4)
    ranks(2, saved, tmp_path / "cut", EP2, True, 2)
    ranks(2, saved, tmp_path / "cut", EP2, False, 2)
    one, other = files(tmp_path / "through", 4), files(tmp_path / "cut", 4)
    assert all(torch.equal(one[name], other[name]) for name in one) and one.keys() == other.keys()


@pytest.mark.parametrize("layout", ["ep4", *(pytest.param(n, marks=SLOW) for n in ("fsdp, sharded experts", "tp"))])
@pytest.mark.parametrize("adapter", [False, pytest.param(True, marks=SLOW)], ids=["full", "lora"])
def test_an_export_is_that_of_the_whole(tmp_path: Path, layout: str, adapter: bool) -> None:
    def work(rank: int) -> None:
        world, model = meshed(*LAYOUTS[layout]), moe(adapter)
        world.shard(model, Decisions())
        model.save(tmp_path / "spread" if rank == 0 else None)

    moe(adapter).save(tmp_path / "whole")
    ranks(4, work)
    whole, spread = ({p.name: p.read_bytes() for p in (tmp_path / n).iterdir()} for n in ("whole", "spread"))
    assert whole.keys() == spread.keys()
    assert all(whole[name] == spread[name] for name in whole if name != "adapter_config.json")
