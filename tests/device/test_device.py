"""Devices: what the processor promises, and what is said where a device is missing."""

from __future__ import annotations

import pytest
import torch

from runner.core.auto_choices import Decisions
from runner.core.errors import EnvironmentProblem
from runner.device.auto import pick
from runner.device.config import AutoConfig, CpuConfig, CudaConfig, NpuConfig
from runner.device.cpu import Cpu
from runner.device.cuda import Cuda


def test_the_processor_fixes_its_threads() -> None:
    device = Cpu(CpuConfig(threads=1), decide=Decisions())
    device.prepare()
    assert torch.get_num_threads() == 1 and device.describe()["threads"] == 1
    assert 10e6 < device.peak_memory_bytes() < 100e9, "bytes, not kilobytes"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is present")
def test_cuda_without_a_gpu_says_what_to_do() -> None:
    with pytest.raises(EnvironmentProblem, match="device=cpu") as caught:
        Cuda(CudaConfig(), decide=Decisions())
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(("capability", "emulates"), [((7, 5), True), ((8, 0), False)])
def test_a_card_that_emulates_bfloat16_says_so(
    capability: tuple[int, int], emulates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("runner.device.cuda.select_card", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a card")
    decisions = Decisions()
    device = Cuda(CudaConfig(), decide=decisions)
    assert device.unsupported_reason(torch.bfloat16) is device.unsupported_reason(torch.float32) is None
    assert [d.got for d in decisions.entries] == ["bfloat16 is emulated"] * emulates
    assert not any(d.is_fact for d in decisions.entries), "an error under strict=true"


def test_npu_without_a_card_lists_what_is_missing_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_TOOLKIT_HOME", "/nowhere")
    with pytest.raises(EnvironmentProblem) as caught:
        NpuConfig().preflight()
    text = str(caught.value)
    assert caught.value.exit_code == 2
    assert text.index("/dev/davinci") < text.index("no CANN in") < text.index("run doctor device=npu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is present")
def test_auto_says_what_it_chose() -> None:
    decisions = Decisions()
    assert pick(AutoConfig(), decide=decisions).name == "cpu"
    assert [d.got for d in decisions.entries] == ["cpu"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is present")
def test_auto_says_that_a_data_type_was_chosen_for_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AutoConfig, "_likely_device", lambda _: CudaConfig())
    decisions = Decisions()
    assert pick(AutoConfig(), decide=decisions).name == "cpu"
    said = decisions.entries[-1]
    assert (said.wanted, said.got) == ("float32", "bfloat16") and "type device=cpu" in said.reason


def test_strict_refuses_a_fallback_and_not_a_confirmation() -> None:
    decide = Decisions(strict=True)
    decide("attention", "packed", "packed", "supported")
    with pytest.raises(EnvironmentProblem, match="strict=true does not allow"):
        decide("attention", "packed", "padded", "softcap")
