"""The most that a device computes: by the table of cards, or by a measured matrix product where it is in no table."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache

import torch

from runner.device.cards import find_card
from runner.interfaces import Decide, Device

SMALLEST, LARGEST = 512, 8192  # of square matrices
LEAST_S = 1e-3  # a product that takes less is mostly its launch: a larger one is taken
PRODUCTS, SECONDS = 20, 0.05  # of measuring, in processor time: a busy machine gets as many; the fastest one counts


@dataclass(frozen=True, slots=True)
class Peak:
    """flops: operations per second of matrix products; source: where the figure is from, in words."""

    flops: float
    source: str


def peak(device: Device, dtype: torch.dtype, decide: Decide) -> Peak:
    """That of a device in what it computes products of `dtype` in. `decide` hears of an accelerator's."""
    precision = device.matmul_precision(dtype)
    card = find_card(device.describe().get("card", ""))
    if card is not None and device.name == card.device and precision in card.flops:
        found = Peak(card.flops[precision], f"{card.name} in {precision}, from the table of cards")
    else:
        found = Peak(measure_matmul(device.torch_device, dtype), f"measured on this device in {precision}")
    if device.torch_device.type != "cpu":
        decide.state("perf/mfu", f"a share of {found.flops / 1e12:.4g} TFLOP/s", found.source)
    return found


@cache
def measure_matmul(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of the fastest of some products of random matrices; once in a process. Draws from a
    generator of its own."""
    generator = torch.Generator(device).manual_seed(0)

    def matrix(size: int) -> torch.Tensor:
        return torch.randn(size, size, device=device, dtype=dtype, generator=generator)

    size, a = SMALLEST, matrix(SMALLEST)
    _seconds(a, a)  # the first call of a library is slow
    while (seconds := _seconds(a, a)) < LEAST_S and size < LARGEST:
        size, a = 2 * size, matrix(2 * size)
    begin = time.process_time()
    for _ in range(PRODUCTS):
        seconds = min(seconds, _seconds(a, a))
        if time.process_time() - begin > SECONDS:
            break
    return float(2 * size**3 / seconds)


def _seconds(a: torch.Tensor, b: torch.Tensor) -> float:
    _wait(a.device)
    begin = time.perf_counter()
    torch.mm(a, b)
    _wait(a.device)
    return time.perf_counter() - begin


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
