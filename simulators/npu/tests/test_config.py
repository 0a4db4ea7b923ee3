"""What the package adds to `run`: the device by its entry points, its cards, its conf file, its wheel."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

import npu_simulator
from npu_simulator.config import NpuSimConfig
from runner.cli.conf import main as check_conf
from runner.cli.job_builder import compose_job
from runner.core.device_kinds import NPU, ResourceRequest
from runner.core.errors import SpecError
from runner.spec.registry import default_registry

PACKAGE = Path(npu_simulator.__file__).parent


def test_its_entry_points_make_it_a_device_of_the_kind_of_an_npu() -> None:
    assert default_registry().classes("device")["npu_sim"] is NpuSimConfig
    assert NpuSimConfig().kind is NPU and NpuSimConfig().simulator(3) == NpuSimConfig(cards=3)


def test_its_cards_are_those_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert NpuSimConfig(cards=3).visible() == ("0", "1", "2")
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "1,7")
    assert NpuSimConfig(cards=3).visible() == ("1",), "a driver leaves out what it does not have"


def test_a_job_on_it_occupies_cores(workdir: Path) -> None:
    assert str(ResourceRequest.of_spec(compose_job(["+recipe=sft_demo", "device=npu_sim"]).spec)) == "1 core"


def test_more_processes_than_cards_are_refused(workdir: Path) -> None:
    words = ["+recipe=sft_demo", "device=npu_sim", "launch.devices=2"]
    with pytest.raises(SpecError, match=r"type device\.cards=2"):
        compose_job(words)


def test_deepspeed_refuses_it_by_name(workdir: Path) -> None:
    words = ["+recipe=sft_demo", "launch.devices=2", "device=npu_sim", "device.cards=2", "parallelism=deepspeed_zero3"]
    with pytest.raises(SpecError, match="does not support device=npu_sim; type parallelism=fsdp"):
        compose_job(words)


def test_its_conf_file_is_what_its_config_says() -> None:
    """To correct it: python -m runner.cli.conf --write npu_simulator"""
    assert check_conf(["--check", "npu_simulator"]) == 0
    assert (PACKAGE / "conf/device/npu_sim.yaml").is_file()


def test_its_wheel_carries_conf_and_sources(tmp_path: Path) -> None:
    from hatchling.builders.wheel import WheelBuilder

    [wheel] = WheelBuilder(str(PACKAGE.parent)).build(directory=str(tmp_path), versions=["standard"])
    names = set(zipfile.ZipFile(wheel).namelist())
    kinds = (".py", ".c", ".cpp", ".yaml")
    files = {str(path.relative_to(PACKAGE.parent)) for path in PACKAGE.rglob("*") if path.suffix in kinds}
    assert files <= names and {Path(name).suffix for name in files} == set(kinds)
    assert all(name.startswith(("npu_simulator/", "posttrain_run_npu_simulator-")) for name in names)
