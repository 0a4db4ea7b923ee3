"""What a kind of device is called, and which of its cards a process may use: told without torch."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from runner.cli.job_builder import compose_job
from runner.core import device_kinds
from runner.core.device_kinds import CPU, CUDA, KINDS, NPU, Kind, ResourceRequest, find_kind, register
from runner.core.errors import EnvironmentProblem, Problem, SpecError
from runner.device.config import COMPONENTS, AutoConfig, CpuConfig, CudaConfig, DeviceConfig, NpuConfig
from runner.launch.ray.placement import bundles, request_text
from runner.launch.slurm.commands import gres_of
from runner.parallelism.config import Zero3Config
from runner.sweep.local_executor import cards_here, visible_devices_env


@pytest.mark.parametrize(
    ("config", "backend", "variable", "resource"),
    [
        (CpuConfig(), "gloo", None, "CPU"),
        (CudaConfig(), "cpu:gloo,cuda:nccl", "CUDA_VISIBLE_DEVICES", "GPU"),
        (NpuConfig(), "cpu:gloo,npu:hccl", "ASCEND_RT_VISIBLE_DEVICES", "NPU"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_every_device_has_a_kind(config: CpuConfig, backend: str, variable: str | None, resource: str) -> None:
    assert (config.kind.backend, config.kind.visible, config.kind.resource) == (backend, variable, resource)
    assert KINDS[config.kind.name] is config.kind


def test_auto_is_of_the_kind_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {config.component_name() for config in COMPONENTS} == {"cpu", "cuda", "npu", "auto"}
    assert AutoConfig().kind in (CPU, CUDA, NPU)
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr("runner.device.config._npu_missing", lambda: ["none"])
    monkeypatch.setattr("runner.device.config.CUDA", replace(CUDA, nodes=f"{tmp_path}/nvidia*"))
    assert AutoConfig().float32_peak == CudaConfig().float32_peak
    assert AutoConfig().matmul_precision("float32") == "tf32"
    assert AutoConfig().numerics_options == CudaConfig().numerics_options != CudaConfig(tf32=False).numerics_options


@pytest.fixture
def cards(tmp_path: Path) -> Kind:
    """A kind with device files 0, 2 and 10, and others beside them."""
    for name in ("card0", "card2", "card10", "card0_manager", "cards"):
        (tmp_path / name).touch()
    nodes = f"{tmp_path}/card[0-9]*"
    return Kind(
        name="card", collectives="x", resource="CARD", word="card", visible="CARDS", names=("MIG-",), nodes=nodes
    )


def test_the_cards_are_those_of_the_list_or_else_the_device_files(cards: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_kinds.present_cards(cards) == ("0", "1", "2"), "drivers count from 0"
    for text, wanted in {"2,10": ("2", "10"), "": (), "MIG-7,0": ("MIG-7", "0")}.items():
        monkeypatch.setenv("CARDS", text)
        assert device_kinds.present_cards(cards) == wanted
    monkeypatch.setenv("CARDS", "0,0")
    with pytest.raises(EnvironmentProblem, match=r"0 is listed twice\n .* unset CARDS"):
        device_kinds.present_cards(cards)


def test_a_list_in_a_variable_that_no_driver_reads_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_VISIBLE_DEVICES", "2,3")
    with pytest.raises(
        EnvironmentProblem, match=r"hides no card: .*\n  export ASCEND_RT_VISIBLE_DEVICES=2,3; unset NPU"
    ):
        device_kinds.listed_cards(NPU)
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "1")
    assert device_kinds.listed_cards(NPU) == ("1",) and device_kinds.listed_cards(CUDA) is None


def test_the_processor_has_none_and_an_npu_those_of_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CpuConfig().visible() is None
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "1,7")
    assert NpuConfig().visible() == ("1", "7")


def test_a_kind_from_elsewhere_is_handed_out_like_ours(cards: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    class CardConfig(DeviceConfig):
        name: Literal["mine"] = "mine"

        @property
        def kind(self) -> Kind:
            return cards

    monkeypatch.setitem(KINDS, "card", cards)  # for this test alone
    assert register(cards) is find_kind("card")
    spec = compose_job(["launch.devices=2", "parallelism=ddp"]).spec.model_copy(update={"device": CardConfig()})
    need = ResourceRequest.of_spec(spec)
    assert (need, str(need), gres_of(None, need)) == (ResourceRequest("card", 2), "2 cards", "card")
    assert visible_devices_env(need, ("0", "10")) == {"CARDS": "0,10"} and "card" in cards_here()
    assert request_text(bundles(spec)) == "2 cards"
    with pytest.raises(SpecError, match="does not support device=mine; type parallelism=fsdp"):
        raise SpecError([Problem(*one) for one in Zero3Config().problems(spec)])


def test_none_of_it_imports_torch() -> None:
    program = (
        "import sys; from runner.device.config import COMPONENTS; [c().kind.backend for c in COMPONENTS]; "
        "[c().visible() for c in COMPONENTS]; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
