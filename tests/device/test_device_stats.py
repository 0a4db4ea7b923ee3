"""What a device is doing: read from the programs that print it, by the card that this process really uses."""

from __future__ import annotations

import json
import os
import stat
import threading
import time
from pathlib import Path

import pytest
import torch

from runner.cli.main import main
from runner.core.device_kinds import NPU
from runner.core.errors import EnvironmentProblem
from runner.device.base import process_stats_reader, refuse_hidden, translate_startup_errors
from runner.device.device_stats import gpu_stats_reader, npu_stats_reader
from runner.interfaces import StepResult
from runner.trainer.callbacks import DeviceStats

INFO = """
+------------------------------------------------------------------------------------------------+
| npu-smi 25.2.1                   Version: 25.2.1                                               |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 4     910B3               | OK            | 93.5        41                0    / 0             |
| 0                         | 0000:C1:00.0  | 3           0    / 0          3000 / 65536         |
+===========================+===============+====================================================+
| 7     910B3               | OK            | 301.2       62                0    / 0             |
| 0                         | 0000:42:00.0  | 88          0    / 0          61000/ 65536         |
+===========================+===============+====================================================+
"""
MAPPING = """
    NPU ID                         Chip ID                        Chip Logic ID                  Chip Name
    4                              0                              0                              Ascend 910B3
    4                              1                              -                              Mcu
    7                              0                              1                              Ascend 910B3
"""
GPUS = """0, NVIDIA H100, GPU-aaaa-1, 1024, 81559, 7, 33, 71.50
1, NVIDIA H100, GPU-bbbb-2, 2048, 81559, 99, 64, 650.25
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """npu-smi and nvidia-smi that print what is above."""
    for name, body in (
        ("npu-smi", f'if [ "$2" = -m ]; then cat <<"E"\n{MAPPING}\nE\nelse cat <<"E"\n{INFO}\nE\nfi'),
        ("nvidia-smi", f'cat <<"E"\n{GPUS}\nE'),
    ):
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


@pytest.mark.parametrize(
    ("index", "visible", "watts"),
    [(0, None, 93.5), (1, None, 301.2), (0, "1", 301.2), (1, "1,0", 93.5)],
)
def test_an_npu_is_found_by_the_number_that_this_process_uses(
    programs: Path, index: int, visible: str | None, watts: float
) -> None:
    found = npu_stats_reader(index, visible)()
    assert found["power_w"] == watts
    if watts == 301.2:
        assert found == {
            "utilization_percent": 88,
            "temperature_c": 62,
            "power_w": watts,
            "memory_used_bytes": 61000 * 2**20,
        }


def test_a_gpu_is_found_by_its_uuid(programs: Path) -> None:
    for uuid in ("bbbb-2", "GPU-bbbb-2"):
        assert gpu_stats_reader(uuid)()["power_w"] == 650.25
    with pytest.raises(EnvironmentProblem, match="no GPU MIG-3"):
        gpu_stats_reader("MIG-3")()


def test_a_program_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for read in (gpu_stats_reader("a"), npu_stats_reader(0, None)):
        with pytest.raises(EnvironmentProblem, match="-smi"):
            read()


def test_the_process_tells_what_it_takes() -> None:
    began = time.monotonic()
    read = process_stats_reader()
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass
    found = read()
    least = 0.7 * 100 * 0.1 / (time.monotonic() - began)  # other processes may take most of the cores
    assert least < found["utilization_percent"] <= 1000 and 10e6 < found["resident_bytes"] < 100e9


def ended(activity: DeviceStats) -> dict[str, float]:
    """What a step that ends now is given."""
    step = StepResult(1, {}, last=False)
    activity.on_step(step)
    return step.values


def first_stats(activity: DeviceStats) -> dict[str, float]:
    """What the first step is given that is given something."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if found := ended(activity):
            return found
        time.sleep(0.01)
    raise AssertionError("nothing was measured")


def test_a_slow_reading_holds_up_no_step_and_is_handed_over_once() -> None:
    measured = threading.Event()

    def slow() -> dict[str, float]:
        measured.wait(60)
        return {"power_w": 5.0}

    activity = DeviceStats([slow], every_s=60)
    activity.on_start(0)
    assert ended(activity) == {}
    measured.set()
    assert [first_stats(activity), ended(activity)] == [{"device/power_w": 5.0}, {}]
    activity.close()
    activity._thread.join(60)
    assert not activity._thread.is_alive()


def test_a_reading_that_fails_is_said_once_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    def failing() -> dict[str, float]:
        raise EnvironmentProblem("npu-smi info: dcmi is asleep")

    activity = DeviceStats([failing, lambda: {"allocated_bytes": 7.0}], every_s=0.01)
    activity.on_start(0)
    assert first_stats(activity) == {"device/allocated_bytes": 7.0}
    activity.close()
    assert [record.message for record in caplog.records if "dcmi is asleep" in record.message] == [
        caplog.text and ("some device metrics (device/…) are not recorded: npu-smi info: dcmi is asleep")
    ]


@pytest.mark.parametrize(
    ("text", "count", "fine"),
    [(None, 8, True), ("0,1", 2, True), ("0,1,3,4", 3, False), ("0,x", 1, False), ("", 0, True)],
)
def test_devices_that_a_driver_drops_silently_are_refused(
    text: str | None, count: int, fine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is not None:
        monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", text)
    if fine:
        refuse_hidden(NPU, count)
    else:
        with pytest.raises(EnvironmentProblem, match="unset ASCEND_RT_VISIBLE_DEVICES"):
            refuse_hidden(NPU, count)


def test_a_run_records_it_and_can_leave_it(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = DeviceStats.on_start

    def start_and_wait(stats: DeviceStats, step: int) -> None:
        start(stats, step)
        while stats._readings and not stats._newest:
            time.sleep(0.01)  # a busy machine ends three small steps before the first reading

    monkeypatch.setattr(DeviceStats, "on_start", start_and_wait)
    small = [
        "steps=3",
        "tracker=none",
        "evaluation.every=0",
        "model.layers=1",
        "model.hidden_size=32",
        "checkpoint.every=0",
    ]
    assert main([*small, "checkpoint.export=false"]) == 0
    assert main([*small, "checkpoint.export=false", "watch.device_stats_interval_s=0"]) == 0
    first, second = (
        {key for line in path.read_text().splitlines() for key in json.loads(line) if key.startswith("device/")}
        for path in sorted(Path("outputs").glob("*/*/metrics.jsonl"), key=lambda path: path.stat().st_mtime)
    )
    assert (first, second) == ({"device/utilization_percent", "device/resident_bytes"}, set())


def test_what_a_card_refuses_at_its_first_use_is_no_bug_but_memory_that_is_out_is_told_apart() -> None:
    with (
        pytest.raises(EnvironmentProblem, match=r"device=npu: no such option\n.*run doctor device=npu"),
        translate_startup_errors("npu"),
    ):
        raise RuntimeError("no such option\nERR00009")
    with pytest.raises(torch.OutOfMemoryError), translate_startup_errors("npu"):
        raise torch.OutOfMemoryError("NPU out of memory")
