"""Checkpoints of sharded models: one format whatever the layout, and nothing of it on a rank that does not need it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from runner.checkpoint.config import SafetensorsConfig
from runner.checkpoint.store import CheckpointStore
from runner.core.errors import CheckpointError, RunnerError
from runner.parallelism.process_groups import ProcessGroupCollectives
from runner.trainer.learner import LocalLearner
from tests.parallelism.forked import TIMEOUT_S, ranks
from tests.parallelism.test_fsdp import CPU, made, part, sharded


def learner(model: Any) -> LocalLearner:
    optimizer = torch.optim.AdamW(model.trainable().values(), lr=1e-2, fused=True)
    options: dict[str, Any] = {"lr": 1e-2, "clip_norm": 1.0, "factor": lambda step: 1.0, "budget": 10**6, "seed": 0}
    return LocalLearner(model, optimizer, device=CPU, **options)


def step(one: LocalLearner, rank: int, size: int) -> None:
    batch = part(rank, size)
    total, _ = one.model.linear_loss(batch, -batch.tokens["weight"] / 50)
    one._backward(total, is_last=True)
    one.optim_step()


def store(root: Path) -> CheckpointStore:
    made = CheckpointStore(SafetensorsConfig(), root=root, report=lambda _: None)
    if torch.distributed.is_initialized():
        made.peers = ProcessGroupCollectives(torch.distributed.group.WORLD, TIMEOUT_S)
    return made


def built(adapter: bool, shape: tuple[int, int] | None) -> LocalLearner:
    model = made("qwen2", adapter, vocab_size=301)  # which no number of ranks divides
    return learner(model if shape is None else sharded(model, shape))


def saved(rank: int, root: Path, adapter: bool, shape: tuple[int, int] | None, start: bool, steps: int) -> None:
    """Go on from the newest checkpoint for some steps, and save."""
    one, kept = built(adapter, shape), store(root)
    size = 1 if shape is None else shape[0] * shape[1]
    first = 0
    if not start:
        loaded = kept.load(mapped=True)
        assert loaded is not None
        first = loaded.step
        one.load_state_dict(loaded.state["policy"])
    for _ in range(steps):
        step(one, rank, size)
    folder = kept.save(first + steps, {"policy": one.state_dict()}, {"train/loss": 1.0})
    assert folder.is_dir()


def files(root: Path, number: int) -> dict[str, Tensor]:
    return load_file(root / f"step-{number:08d}" / "policy.safetensors")


def close(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert got[name].shape == tensor.shape and got[name].dtype == tensor.dtype, name
        assert float((got[name] - tensor).abs().max()) <= 2e-3 * max(1.0, float(tensor.abs().max())), name


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
def test_any_layout_goes_on_from_any_other(tmp_path: Path, adapter: bool) -> None:
    saved(0, tmp_path / "alone", adapter, None, True, 4)
    root = tmp_path / "many"
    ranks(2, saved, root, adapter, (1, 2), True, 1)
    saved(0, root, adapter, None, False, 1)
    ranks(4, saved, root, adapter, (2, 2), False, 1)
    ranks(2, saved, root, adapter, (1, 2), False, 1)
    close(files(root, 4), files(tmp_path / "alone", 4))


def test_what_two_ranks_write_is_what_one_would(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        one = built(True, (1, 2))
        step(one, rank, 2)
        state = one.state_dict()
        store(tmp_path / "pieces").save(1, {"policy": state}, {})
        whole = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in state["tensors"].items()}
        if rank == 0:
            alone = CheckpointStore(SafetensorsConfig(), root=tmp_path / "whole", report=lambda _: None)
            alone.save(1, {"policy": {**state, "tensors": whole}}, {})

    ranks(2, work)
    for name in ("policy.safetensors", "state.json"):
        one, other = (tmp_path / kind / "step-00000001" / name for kind in ("pieces", "whole"))
        assert one.read_bytes() == other.read_bytes()


@pytest.mark.slow
def test_the_same_layout_goes_on_bit_for_bit(tmp_path: Path) -> None:
    ranks(2, saved, tmp_path / "through", False, (1, 2), True, 4)
    ranks(2, saved, tmp_path / "cut", False, (1, 2), True, 2)
    ranks(2, saved, tmp_path / "cut", False, (1, 2), False, 2)
    one, other = files(tmp_path / "through", 4), files(tmp_path / "cut", 4)
    assert all(torch.equal(one[name], other[name]) for name in one) and one.keys() == other.keys()


@pytest.mark.parametrize(
    ("victim", "point"),
    [
        (0, "checkpoint.write"),
        (1, "checkpoint.mid_write"),
        (0, "checkpoint.before_rename"),
        pytest.param(1, "checkpoint.write", marks=pytest.mark.slow),
        pytest.param(0, "checkpoint.mid_write", marks=pytest.mark.slow),
        pytest.param(1, "checkpoint.before_rename", marks=pytest.mark.slow),
    ],
)
def test_a_disk_that_refuses_one_rank_is_an_error_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, victim: int
) -> None:
    def work(rank: int) -> str:
        one, kept = built(True, (1, 2)), store(tmp_path)
        kept.save(1, {"policy": one.state_dict()}, {})
        if rank == victim:
            monkeypatch.setenv("RUNNER_FAILPOINT", f"{point}:ENOSPC")
        try:
            kept.save(2, {"policy": one.state_dict()}, {})
        except RunnerError as error:
            return str(error)
        return "saved"

    found = ranks(2, work)
    if victim == 1 and point != "checkpoint.mid_write":
        assert found == ["saved", "saved"]  # only the first rank gets there
    else:
        assert all("disk is full" in said for said in found)
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
        assert CheckpointStore(SafetensorsConfig(), root=tmp_path, report=lambda _: None).load() is not None


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_while_it_writes_leaves_the_earlier_checkpoint(tmp_path: Path, victim: int) -> None:
    def work(rank: int) -> None:
        one, kept = built(True, (1, 2)), store(tmp_path)
        kept.save(1, {"policy": one.state_dict()}, {})
        if rank == victim:
            os.environ["RUNNER_FAILPOINT"] = "checkpoint.mid_write:kill"
        kept.save(2, {"policy": one.state_dict()}, {})

    with pytest.raises(AssertionError):
        ranks(2, work)
    kept = CheckpointStore(SafetensorsConfig(), root=tmp_path, report=lambda _: None)
    loaded = kept.load()
    assert loaded is not None and loaded.step == 1
    alone = built(True, None)
    alone.load_state_dict(loaded.state["policy"])
    kept.save(2, {"policy": alone.state_dict()}, {})
    assert kept.steps() == [1, 2] and not list(tmp_path.glob(".staging*"))


def test_a_weight_that_is_not_finite_on_one_rank_stops_all(tmp_path: Path) -> None:
    def work(rank: int) -> str:
        one = built(False, (1, 2))
        if rank == 1:
            next(iter(one.model.trainable().values())).to_local().detach()[-1] = float("nan")
        with pytest.raises(RunnerError, match="NaN or infinity") as caught:
            store(tmp_path).save(1, {"policy": one.state_dict()}, {})
        return str(caught.value)

    assert all("no checkpoint was written" in said for said in ranks(2, work))
    assert not tmp_path.exists() or not list(tmp_path.iterdir())


def test_a_rank_without_its_piece_of_a_tensor_writes_nothing(tmp_path: Path) -> None:
    def work(rank: int) -> str:
        state = built(True, (1, 2)).state_dict()
        if rank == 1:
            state["tensors"].popitem()
        with pytest.raises(RunnerError) as caught:
            store(tmp_path).save(1, {"policy": state}, {})
        return str(caught.value)

    assert all("rank 1 lacks its shard of param/" in said for said in ranks(2, work))
    assert not list(tmp_path.iterdir())


def test_a_folder_that_the_other_machine_does_not_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(rank: int) -> None:
        one = built(False, (1, 2))
        if rank == 1:
            monkeypatch.setattr(Path, "is_dir", lambda _: False)
        with pytest.raises(RunnerError, match="storage that all machines share"):
            store(tmp_path).save(1, {"policy": one.state_dict()}, {})

    ranks(2, work)
    assert not list(tmp_path.iterdir())


def test_two_ranks_go_on_alone(tmp_path: Path) -> None:
    saved(0, tmp_path / "alone", True, None, True, 2)
    ranks(2, saved, tmp_path / "many", True, (1, 2), True, 1)
    saved(0, tmp_path / "many", True, None, False, 1)
    close(files(tmp_path / "many", 2), files(tmp_path / "alone", 2))


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    ranks(2, saved, tmp_path, True, (1, 2), True, 1)

    def work(rank: int) -> None:
        loaded = store(tmp_path).load(mapped=True)
        assert loaded is not None
        with pytest.raises(CheckpointError):
            built(False, (1, 2)).load_state_dict(loaded.state["policy"])

    ranks(2, work)


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("merges", [False, True], ids=["apart", "merged"])
@pytest.mark.parametrize("kind", ["llama", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_an_export_of_pieces_is_that_of_the_whole(tmp_path: Path, kind: str, adapter: bool, merges: bool) -> None:
    if merges and not adapter:
        return

    def export(model: Any, folder: Path | None) -> None:
        if merges:
            model.merge_on_save()
        model.save(folder)

    options = {"tie_word_embeddings": True} if kind == "llama" else {}
    export(made(kind, adapter, **options), tmp_path / "whole")
    build = lambda: sharded(made(kind, adapter, **options), (1, 2))  # noqa: E731
    ranks(2, lambda rank: export(build(), tmp_path / "pieces" if rank == 0 else None))
    whole, pieces = ({p.name: p.read_bytes() for p in (tmp_path / n).iterdir()} for n in ("whole", "pieces"))
    assert whole.keys() == pieces.keys()
    assert all(whole[name] == pieces[name] for name in whole if name != "adapter_config.json")
