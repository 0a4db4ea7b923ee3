"""The peak that perf/mfu is a share of: from the table of cards, or measured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from runner.core.auto_choices import Decisions
from runner.device.base import measure_matmul, peak_flops
from runner.device.cards import find_card
from runner.device.config import CpuConfig, CudaConfig
from runner.device.cpu import Cpu
from runner.interfaces import Device


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA A100-SXM4-40GB", "A100-40G"),
        ("NVIDIA A100 80GB PCIe", "A100"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("Ascend910B2", "910B"),
        ("Ascend910B4", "910B4"),
        ("Ascend910_9392", "910C"),
        ("", None),
    ],
)
def test_a_driver_s_name_is_a_card_of_the_table_or_none(name: str, card: str | None) -> None:
    found = find_card(name)
    assert (found and found.name) == card


def card(tf32: bool, name: str = "NVIDIA H200") -> Device:
    """What an H200 says of itself, computed by the CPU."""
    config = CudaConfig(tf32=tf32)
    made: Any = SimpleNamespace(
        name="cuda",
        torch_device=torch.device("cpu"),
        describe=lambda: {"card": name},
        matmul_precision=lambda dtype: config.matmul_precision(str(dtype).removeprefix("torch.")),
    )
    return cast(Device, made)


def test_the_peak_of_a_card_is_that_of_what_it_computes_in() -> None:
    decide = Decisions()
    assert peak_flops(card(tf32=True), torch.bfloat16, decide).flops == 989e12
    assert peak_flops(card(tf32=True), torch.float32, decide).flops == 495e12
    assert peak_flops(card(tf32=False), torch.float32, decide).flops == 67e12
    unknown = peak_flops(card(tf32=False, name="another"), torch.float32, decide)
    assert unknown.flops == measure_matmul(torch.device("cpu"), torch.float32) and "measured" in unknown.source


def test_measuring_draws_nothing_from_the_stream_of_the_process_and_is_done_once() -> None:
    measure_matmul.cache_clear()
    before = torch.get_rng_state()
    cpu = Cpu(CpuConfig(), decide=Decisions(strict=True))
    found = peak_flops(cpu, torch.float32, Decisions(strict=True))
    assert torch.equal(torch.get_rng_state(), before)
    assert 1e8 < found.flops < 1e14 and peak_flops(cpu, torch.float32, Decisions()).flops == found.flops
