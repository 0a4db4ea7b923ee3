"""Checkpoints that are written while training continues: those of the step they are of, or an error in time."""

from __future__ import annotations

import os
import re
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.checkpoint import format
from runner.checkpoint.config import CheckpointConfig, SafetensorsConfig
from runner.checkpoint.store import CGROUP_FILES, CheckpointStore, available_memory
from runner.core.errors import RunnerError, StorageError, TrainingDiverged
from runner.parallelism.process_groups import ProcessGroupCollectives
from tests.checkpoint.conftest import make_state
from tests.parallelism.forked import TIMEOUT_S, ranks

Open = Callable[..., CheckpointStore]


def contents(root: Path, step: int) -> dict[str, bytes]:
    folder = root / f"step-{step:08d}"
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "MANIFEST.json"}


@contextmanager
def held_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Within, no manifest is made before the event is set."""
    go_on, describe = threading.Event(), format.build_manifest

    def slowly(*arguments: Any) -> Any:
        assert go_on.wait(TIMEOUT_S)
        return describe(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr("runner.checkpoint.format.build_manifest", slowly)
        yield go_on


def test_it_is_of_the_step_it_was_started_at_whatever_changes_meanwhile(
    open_store: Open, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, metrics, state = open_store(), {"loss": 1.0}, make_state(1)
    weight = state["policy"]["tensors"]["weight"]
    tied = state["policy"]["tensors"] | {"again": weight, "turned": weight.T, "some": weight[1:]}
    with held_up(monkeypatch) as go_on:
        store.start(1, {**state, "policy": {"tensors": tied, "step": 1}}, metrics)
        weight.fill_(-1)
        state["policy"]["tensors"]["count"].fill_(-1)
        state["algorithm"]["seen"].append("more")
        metrics["loss"] = 2.0
        store.check()
        assert store.steps() == [], "it is on its way"
        go_on.set()
    store.close()
    fresh = make_state(1)
    weight = fresh["policy"]["tensors"]["weight"]
    tied = fresh["policy"]["tensors"] | {"again": weight, "turned": weight.T, "some": weight[1:]}
    at_once = CheckpointStore(SafetensorsConfig(), root=tmp_path / "at once", report=pytest.fail)
    at_once.save(1, {**fresh, "policy": {"tensors": tied, "step": 1}}, {"loss": 1.0})
    assert contents(root, 1) == contents(tmp_path / "at once", 1)
    assert format.read_manifest(root / "step-00000001").metrics == {"loss": 1.0}


def test_the_next_save_waits_and_says_so(
    open_store: Open, words: list[str], monkeypatch: pytest.MonkeyPatch, root: Path
) -> None:
    finish = CheckpointStore._finish_write

    def finish_after_a_wait(store: CheckpointStore) -> None:
        threading.Timer(0.2, go_on.set).start()
        finish(store)

    monkeypatch.setattr("runner.checkpoint.store.REPORT_WAIT_S", 0.05)
    monkeypatch.setattr(CheckpointStore, "_finish_write", finish_after_a_wait)
    store = open_store(keep=1)
    for save in (store.start, store.save):
        with held_up(monkeypatch) as go_on:
            first = 1 if save == store.start else 3
            store.start(first, make_state(first), {})
            save(first + 1, make_state(first + 1), {})
            store.close()
    assert re.match(r"checkpoint of step 2: waited \d+\.\d s", words[0])
    assert re.match(r"checkpoint of step 4: waited \d+\.\d s", words[-1])
    assert store.steps() == [4] and contents(root, 4)


def test_the_best_and_the_newest_stay(open_store: Open) -> None:
    store = open_store(keep=1, best="loss")
    for step, loss in enumerate((3.0, 1.0, 2.0, 4.0), start=1):
        store.start(step, make_state(step), {"loss": loss})
    store.close()
    assert (store.steps(), store.best()) == ([2, 4], 2)


def test_the_copy_takes_the_same_memory_again(open_store: Open) -> None:
    store, places = open_store(), []
    for step in (1, 2, 3):
        state = make_state(step)
        if step == 2:
            state["feed"] = {"tensors": {"ahead": torch.ones(5)}}
        store.start(step, state, {})
        places.append(store._host._room["policy", "weight"].data_ptr())
        assert ("feed", "ahead") in store._host._room or step != 2
    store.close()
    assert len(set(places)) == 1 and ("feed", "ahead") not in store._host._room


def test_a_number_that_is_not_finite_ends_the_run_a_step_later(open_store: Open, root: Path) -> None:
    store = open_store()
    store.save(1, make_state(1), {})
    state = make_state(2)
    state["policy"]["tensors"]["weight"][1, 1] = float("nan")
    store.start(2, state, {})
    with pytest.raises(TrainingDiverged, match="the tensor weight has NaN or infinity"):
        until_it_lands(store)
    store.check()  # is said once
    assert [path.name for path in root.iterdir()] == ["step-00000001"]


def until_it_lands(store: CheckpointStore) -> None:
    while store._pending is not None:
        store.check()


@pytest.mark.parametrize("verb", ["check", "start", "save"])
def test_whoever_comes_next_raises_what_went_wrong(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, root: Path, verb: str
) -> None:
    store = open_store()
    store.save(1, make_state(1), {})
    monkeypatch.setenv("RUNNER_FAILPOINT", "checkpoint.mid_write:ENOSPC")
    store.start(2, make_state(2), {})
    with pytest.raises(StorageError, match=r"checkpoint of step 2 in .*: the disk is full; needed \d+ bytes"):
        until_it_lands(store) if verb == "check" else getattr(store, verb)(3, make_state(3), {})
    assert [path.name for path in root.iterdir()] == ["step-00000001"]


def test_an_error_that_ends_the_run_is_not_hidden_by_another(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    store = open_store()
    monkeypatch.setenv("RUNNER_FAILPOINT", "checkpoint.before_rename:EIO")
    store.start(2, make_state(2), {})
    store.close()
    store.close()
    [said] = words
    assert said.startswith("the checkpoint of step 2 was not written: checkpoint of step 2 in")


def many(root: Path) -> CheckpointStore:
    made = CheckpointStore(SafetensorsConfig(), root=root, report=lambda _: None)
    groups = torch.distributed.group.WORLD, torch.distributed.new_group(backend="gloo")
    made.peers, made.background = (ProcessGroupCollectives(group, TIMEOUT_S) for group in groups)
    return made


def of_rank(rank: int, step: int) -> dict[str, Any]:
    """A state whose tensors are spread over two ranks."""
    return {"policy": {"tensors": {f"own{rank}": torch.full((50, 50), float(step)), "all": torch.tensor(step)}}}


def test_ranks_train_on_while_they_save(tmp_path: Path) -> None:
    """Sums of the training thread go between the gathers of the writing one."""

    def work(rank: int) -> float:
        store, total = many(tmp_path), torch.zeros(10_000)
        for step in range(1, 13):
            state = of_rank(rank, step)
            store.start(step, state, {"step": float(step)})
            for tensor in state["policy"]["tensors"].values():
                tensor.zero_()
            for _ in range(10):
                part = torch.ones(10_000)
                store.peers.all_reduce_([part])
                total += part
            store.check()
        store.close()
        return float(total.mean())

    assert ranks(2, work) == [240.0, 240.0]
    loaded = CheckpointStore(SafetensorsConfig(), root=tmp_path, report=pytest.fail).load()
    assert loaded is not None and loaded.step == 12
    assert {float(t.unique()) for t in loaded.state["policy"]["tensors"].values()} == {12.0}


@pytest.mark.parametrize("victim", [0, 1])
def test_what_fails_on_one_rank_is_raised_on_all_at_the_same_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: int
) -> None:
    def work(rank: int) -> tuple[int, int, str]:
        store = many(tmp_path)
        store.save(1, of_rank(rank, 1), {})
        if rank == victim:
            monkeypatch.setenv("RUNNER_FAILPOINT", "checkpoint.mid_write:ENOSPC")
        store.start(2, of_rank(rank, 2), {})
        step = 3
        while True:
            try:
                store.check()
            except RunnerError as error:
                return step, error.exit_code, str(error)
            step += 1

    (step, code, said), other = sorted(ranks(2, work), key=lambda one: len(one[2]))
    assert (step, code) == other[:2] and code == 7
    assert "the disk is full" in said and other[2] == f"rank {victim}: {said}"
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize("point", ["checkpoint.mid_write", "checkpoint.before_rename"])
def test_a_rank_that_is_killed_while_its_thread_writes_leaves_the_earlier_checkpoint(
    tmp_path: Path, point: str
) -> None:
    def work(rank: int) -> str:
        store = many(tmp_path)
        store.save(1, of_rank(rank, 1), {})
        if rank == 0:
            os.environ["RUNNER_FAILPOINT"] = f"{point}:kill"
        store.start(2, of_rank(rank, 2), {})
        if rank == 0:
            signal.pause()
        store._finish_write()
        return "saved"

    with pytest.raises(AssertionError, match=r"rank 0 died without an answer|another rank exited"):
        ranks(2, work)
    store = CheckpointStore(SafetensorsConfig(), root=tmp_path, report=lambda _: None)
    loaded = store.load()
    assert loaded is not None and loaded.step == 1
    store.save(2, make_state(2), {})
    assert not list(tmp_path.glob(".staging*"))


def test_a_copy_that_one_rank_has_no_memory_for_starts_nothing(tmp_path: Path) -> None:
    def work(rank: int) -> str:
        store, state = many(tmp_path), of_rank(rank, 1)
        if rank == 1:
            state["policy"]["tensors"]["large"] = torch.empty(2**28, dtype=torch.uint8)
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**27, resource.RLIM_INFINITY))
        with pytest.raises(RunnerError, match="not enough host memory for a copy of the checkpoint: ") as caught:
            store.start(1, state, {})
        assert caught.value.exit_code == 75
        store.check()
        return str(caught.value)

    assert all("type checkpoint.asynchronous=false" in said for said in ranks(2, work))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("needed", "fits"), [(1, True), (2**62, False)])
def test_the_free_memory_decides_by_default_and_is_said(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, needed: int, fits: bool
) -> None:
    facts: list[tuple[str, ...]] = []
    store, size = open_store(), sum(t.nbytes for t in make_state(1)["policy"]["tensors"].values())
    store.record_fact = lambda *fact: facts.append(fact)
    monkeypatch.setattr("runner.checkpoint.store.available_memory", lambda: 2 * size // needed)
    for step in (1, 2):
        store.start(step, make_state(step), {})
        assert (store._pending is not None) == fits
        store.close()
    assert store.steps() == [1, 2]
    [(feature, value, reason)] = facts
    assert (feature, value) == ("checkpoint.asynchronous", str(fits).lower())
    assert reason.startswith(f"the copy needs {size} B, {2 * size // needed} B of host memory are free")


def test_ranks_decide_alike_by_the_machine_with_the_least_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(rank: int) -> bool:
        monkeypatch.setattr("platform.node", lambda: f"machine {rank}")
        monkeypatch.setattr("runner.checkpoint.store.available_memory", lambda: 10_000 + 10**9 * rank)
        store = many(tmp_path)
        store.start(1, of_rank(rank, 1), {})
        return store._pending is None and store.steps() == [1]

    assert ranks(2, work) == [True, True]


@pytest.mark.parametrize("folder", ["", "slurm/job_7/step_0", "slurm/job_7"])
@pytest.mark.parametrize("old", [False, True])
def test_limits_of_containers_and_slurm_jobs_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, old: bool
) -> None:
    whole = available_memory()
    membership = tmp_path / "membership"
    membership.write_text(f"3:cpu:/\n{'4:memory' if old else '0:'}:/slurm/job_7/step_0\n")
    monkeypatch.setattr("runner.checkpoint.store.CGROUP", tmp_path)
    monkeypatch.setattr("runner.checkpoint.store.MEMBERSHIP", membership)
    assert available_memory() == pytest.approx(whole, rel=0.5)
    limited = tmp_path / ("memory" if old else "") / folder
    limited.mkdir(parents=True, exist_ok=True)
    limit, used, cache = CGROUP_FILES["memory" if old else ""]
    for name, text in {limit: "max", used: "700", "memory.stat": f"anon 300\n{cache} 400"}.items():
        (limited / name).write_text(text + "\n")
    assert available_memory() == pytest.approx(whole, rel=0.5)
    (limited / limit).write_text("1000\n")
    assert available_memory() == 700


def test_an_option_that_nothing_would_use_is_refused() -> None:
    config = CheckpointConfig(name="c", asynchronous=True, every=0)
    [(key, text)] = config.problems(None)
    assert key == "checkpoint.asynchronous" and "every=0" in text
    assert CheckpointConfig(name="c", asynchronous=True).problems(None) == []
