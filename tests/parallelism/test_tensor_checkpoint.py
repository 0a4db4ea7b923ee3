"""Checkpoints and exports of models whose layers lie in slices: those of the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from runner.checkpoint.config import SafetensorsConfig
from runner.checkpoint.store import CheckpointStore
from runner.trainer.learner import LocalLearner
from tests.parallelism.forked import ranks
from tests.parallelism.test_fsdp import made
from tests.parallelism.test_fsdp_checkpoint import close, files, learner, step, store
from tests.parallelism.test_tensor_parallel import LORA, SLOW, sliced

Grid = tuple[int, int, int]


def built(adapter: bool, grid: Grid | None) -> LocalLearner:
    model = made("qwen3", adapter, vocab_size=302)  # of two slices neither divides into two pieces
    return learner(model if grid is None else sliced(model, grid))


def saved(rank: int, root: Path, adapter: bool, grid: Grid | None, start: bool, steps: int) -> None:
    """Go on from the newest checkpoint for some steps, and save."""
    one, kept, first = built(adapter, grid), store(root), 0
    data, slices = (1, 1) if grid is None else (grid[0] * grid[1], grid[2])
    if not start:
        loaded = kept.load(mapped=True)
        assert loaded is not None
        first = loaded.step
        one.load_state_dict(loaded.state["policy"])
    for _ in range(steps):
        step(one, rank // slices, data)
    assert kept.save(first + steps, {"policy": one.state_dict()}, {"train/loss": 1.0}).is_dir()


@pytest.mark.slow
@LORA
def test_any_layout_goes_on_from_any_other(tmp_path: Path, adapter: bool) -> None:
    saved(0, tmp_path / "alone", adapter, None, True, 5)
    root = tmp_path / "many"
    ranks(2, saved, root, adapter, (1, 1, 2), True, 1)
    saved(0, root, adapter, None, False, 1)
    ranks(4, saved, root, adapter, (1, 2, 2), False, 1)
    ranks(2, saved, root, adapter, (1, 2, 1), False, 1)
    ranks(2, saved, root, adapter, (1, 1, 2), False, 1)
    close(files(root, 5), files(tmp_path / "alone", 5))


@pytest.mark.parametrize("grid", [(1, 2, 2), pytest.param((1, 1, 2), marks=SLOW), pytest.param((2, 1, 2), marks=SLOW)])
def test_what_many_ranks_write_is_what_one_would(tmp_path: Path, grid: Grid) -> None:
    def work(rank: int) -> None:
        one = built(False, grid)
        if grid[0] == 1:
            step(one, rank // 2, grid[1])
        state = one.state_dict()
        store(tmp_path / "pieces").save(1, {"policy": state}, {})
        whole = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in state["tensors"].items()}
        if rank == 0:
            alone = CheckpointStore(SafetensorsConfig(), root=tmp_path / "whole", report=lambda _: None)
            alone.save(1, {"policy": {**state, "tensors": whole}}, {})

    ranks(grid[0] * grid[1] * grid[2], work)
    one, other = (tmp_path / kind / "step-00000001" / "policy.safetensors" for kind in ("pieces", "whole"))
    assert one.read_bytes() == other.read_bytes()


@pytest.mark.slow
def test_the_same_layout_goes_on_bit_for_bit(tmp_path: Path) -> None:
    ranks(2, saved, tmp_path / "through", True, (1, 1, 2), True, 4)
    ranks(2, saved, tmp_path / "cut", True, (1, 1, 2), True, 2)
    ranks(2, saved, tmp_path / "cut", True, (1, 1, 2), False, 2)
    one, other = files(tmp_path / "through", 4), files(tmp_path / "cut", 4)
    assert all(torch.equal(one[name], other[name]) for name in one) and one.keys() == other.keys()


@pytest.mark.parametrize(
    ("kind", "adapter", "merges"),
    [
        pytest.param("llama", False, False, id="full"),
        pytest.param("llama", True, True, id="merged", marks=SLOW),
        pytest.param("qwen3_moe", True, False, id="apart", marks=SLOW),
    ],
)
def test_an_export_of_slices_is_that_of_the_whole(tmp_path: Path, kind: str, adapter: bool, merges: bool) -> None:
    options: dict[str, Any] = {"tie_word_embeddings": True} if kind == "llama" else {}

    def export(model: Any, folder: Path | None) -> None:
        if merges:
            model.merge_on_save()
        model.save(folder)

    def work(rank: int) -> None:
        export(sliced(made(kind, adapter, **options), (1, 1, 2)), tmp_path / "slices" if rank == 0 else None)

    export(made(kind, adapter, **options), tmp_path / "whole")
    ranks(2, work)
    whole, slices = ({p.name: p.read_bytes() for p in (tmp_path / n).iterdir()} for n in ("whole", "slices"))
    assert whole.keys() == slices.keys()
    assert all(whole[name] == slices[name] for name in whole if name != "adapter_config.json")


def test_every_rank_has_its_share_only() -> None:
    def work(rank: int) -> tuple[int, int]:
        model = sliced(made("llama", False), (1, 1, 2))
        norms = sum(p.numel() for name, p in model.module.named_parameters() if "norm" in name)
        held = sum(p.to_local().untyped_storage().nbytes() for p in model.whole.parameters())
        return held, 4 * (sum(p.numel() for p in model.whole.parameters()) - norms) // 2 + 4 * norms

    for held, share in ranks(2, work):
        assert held == share
