"""Devices are handed out once, taken back, and never more than there are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.cli.job_builder import compose_job
from runner.core.device_kinds import KINDS, ResourceRequest
from runner.core.errors import EnvironmentProblem, SpecError
from runner.sweep.config import SweepConfig
from runner.sweep.executor import placement_text, request_of
from runner.sweep.local_executor import LocalExecutor, cards_here, visible_devices_env


def slots_for(needs: list[ResourceRequest], parallel: int | None) -> LocalExecutor:
    executor = LocalExecutor(SweepConfig(parallel=parallel))
    executor.check(needs)
    return executor


def test_each_job_gets_cards_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "4,5,6,7")
    slots = slots_for([ResourceRequest("npu", 1)] * 6, None)
    got = [slots.acquire(ResourceRequest("npu", 1)) for _ in range(5)]
    assert got == [("4",), ("5",), ("6",), ("7",), None]
    assert visible_devices_env(ResourceRequest("npu", 1), ("6",)) == {"ASCEND_RT_VISIBLE_DEVICES": "6"}
    slots.release(ResourceRequest("npu", 1), ("5",))
    assert slots.acquire(ResourceRequest("npu", 1)) == ("5",)


@pytest.mark.parametrize(("kind", "files"), [("cuda", "nvidia"), ("npu", "davinci")])
def test_jobs_in_a_container_with_some_of_the_cards_count_from_zero(
    kind: str, files: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("4", "5", "_manager"):
        (tmp_path / f"{files}{name}").touch()
    monkeypatch.delenv(str(KINDS[kind].visible), raising=False)
    monkeypatch.setitem(KINDS, kind, replace(KINDS[kind], nodes=f"{tmp_path}/{files}[0-9]*"))
    slots, need = slots_for([ResourceRequest(kind, 1)] * 2, None), ResourceRequest(kind, 1)
    assert [slots.acquire(need) for _ in range(3)] == [("0",), ("1",), None]


def test_a_job_that_never_fits_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0,1,2,3")
    with pytest.raises(
        EnvironmentProblem,
        match=r"needs 8 NPUs, but 4 can be used here \(ASCEND_RT_VISIBLE_DEVICES=0,1,2,3\); lower launch.devices or",
    ):
        slots_for([ResourceRequest("npu", 8)], None)
    with pytest.raises(EnvironmentProblem, match=r"this machine has \d+; lower device.threads, launch.devices or"):
        slots_for([ResourceRequest("core", 10**6)], None)
    with pytest.raises(EnvironmentProblem, match="0,1,,3: an empty entry"), pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0,1,,3")
        slots_for([ResourceRequest("npu", 1)], None)
    with pytest.raises(SpecError, match="5 jobs do not fit together: this machine has 4 NPU"):
        slots_for([ResourceRequest("npu", 1)] * 6, 5)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=30), st.data())
def test_no_device_is_ever_held_twice(counts: list[int], data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,GPU-abc")
        slots = slots_for([ResourceRequest("cuda", c) for c in counts], None)
        held: list[tuple[ResourceRequest, tuple[str, ...]]] = []
        for count in counts:
            while (got := slots.acquire(ResourceRequest("cuda", count))) is None:
                slots.release(*held.pop(data.draw(st.integers(0, len(held) - 1))))
            held.append((ResourceRequest("cuda", count), got))
            flat = [d for _, devices in held for d in devices]
            assert len(flat) == len(set(flat)) <= 4


def test_where_a_job_runs_is_said() -> None:
    assert placement_text(ResourceRequest("core", 2), ("0", "1")) == "core 0,1"
    assert placement_text(ResourceRequest("core", 2), ("node7",)) == "node7"
    assert placement_text(ResourceRequest("npu", 1), ("node7:3",)) == "npu node7:3"


def test_what_a_job_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert request_of(compose_job(["device.threads=3"]).spec, cards_here()) == ResourceRequest("core", 3)
    assert request_of(compose_job(["device=cuda"]).spec, cards_here()) == ResourceRequest("cuda", 1)
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0")
    assert request_of(compose_job(["device=auto"]).spec, cards_here()) == ResourceRequest("npu", 1)
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert request_of(compose_job(["device=auto"]).spec, cards_here()) == ResourceRequest("core", 1)


@pytest.mark.parametrize("address", ["auto", "10.0.0.1:6379"])
def test_a_job_on_a_cluster_of_its_own_choice_is_no_job_of_a_sweep(address: str) -> None:
    spec = compose_job(["+recipe=sft_demo", "device=cpu", "launch=ray", f"launch.address={address}"]).spec
    with pytest.raises(SpecError) as caught:
        request_of(spec, ())
    [problem] = caught.value.problems
    assert problem.key == "launch.address"
    assert problem.message.endswith(f"; type launch=local sweep.on=ray sweep.address={address}")
