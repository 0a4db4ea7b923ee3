"""The base of all devices, on `torch.accelerator` and torch's memory functions of each device.

torch.accelerator reports memory only of devices whose allocator is a `c10::DeviceAllocator`. That of torch_npu 2.13 is
one; that of 2.10, for CANN 9.0 and 9.1, is not. torch.npu reports memory with both.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Generic, TypeVar

import psutil
import torch
from torch import nn
from torch.utils import deterministic

from runner.core.device_kinds import Kind, listed_cards
from runner.core.errors import EnvironmentProblem
from runner.core.rank_info import RankInfo
from runner.device.config import DeviceConfig
from runner.interfaces import Decide, DenseAttention, Device, VarlenAttention

if TYPE_CHECKING:
    from runner.device.device_stats import StatsReader


def allocator_stats(device: torch.device) -> dict[str, float]:
    """Bytes of tensors, and bytes that the allocator has reserved."""
    own = torch.get_device_module(device)
    allocated, reserved = own.memory_allocated(device), own.memory_reserved(device)
    return {"allocated_bytes": float(allocated), "reserved_bytes": float(reserved)}


def process_stats_reader() -> StatsReader:
    """Stats of this process: percent of one core since the last reading, and resident memory."""
    process = psutil.Process()
    process.cpu_percent()  # starts the first interval

    def read() -> Mapping[str, float]:
        return {"utilization_percent": process.cpu_percent(), "resident_bytes": float(process.memory_info().rss)}

    return read


def refuse_hidden(kind: Kind, count: int) -> None:
    """Raise EnvironmentProblem if the driver shows another number of cards than the visible list.

    The driver silently ignores invalid entries, and the job would run on other cards.
    """
    asked = listed_cards(kind)
    if asked is not None and len(asked) != count:
        named = "1 device" if len(asked) == 1 else f"{len(asked)} devices"
        raise EnvironmentProblem(
            f"device={kind.name}: {kind.visible}={os.environ[str(kind.visible)]} lists {named}, but the driver shows "
            f"{count}\n"
            f"  correct the list, or type: unset {kind.visible}"
        )


@contextmanager
def translate_startup_errors(device: str) -> Iterator[None]:
    """Raise EnvironmentProblem for errors of torch at the first use of a card, except out of memory.

    The usual cause is a wrong environment variable.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise EnvironmentProblem(f"device={device}: {reason}\n  find the cause: run doctor device={device}") from error


def select_card(kind: Kind, count: int) -> torch.device:
    """Select this process's card by its local rank.

    Raises EnvironmentProblem like `refuse_hidden`, or if there are too few cards.
    """
    refuse_hidden(kind, count)
    place = RankInfo.from_environment(os.environ)
    if place.local_size > count:
        many = f"{place.local_size} processes on this machine need one card each"
        fewer = "launch.devices=1 parallelism=single" if count == 1 else f"launch.devices={count}"
        advice = f"type {fewer}, or list more cards in {kind.visible}"
        raise EnvironmentProblem(f"device={kind.name}: {many}, but the driver shows {count}\n  {advice}")
    with translate_startup_errors(kind.name):
        torch.accelerator.set_device_index(place.local_rank)
    return torch.device(kind.name, place.local_rank)


Settings = TypeVar("Settings", bound=DeviceConfig)


class TorchDevice(Generic[Settings]):
    """A device by `torch.accelerator`, with torch's own attention and no fused operators."""

    name: str

    def __init__(self, config: Settings, torch_device: torch.device, decide: Decide) -> None:
        self.config, self._decide, self.torch_device = config, decide, torch_device
        self.backend = config.kind.backend
        self.allocator = partial(allocator_stats, torch_device)

    def prepare(self) -> None:
        """Let torch use only deterministic kernels, or fail, if the config says so; else any kernel.

        Memory of `torch.empty` is not filled: no code reads uninitialized memory, and it would slow every gather.
        """
        # like use_deterministic_algorithms, which would also import torch's compiler
        torch.set_deterministic_debug_mode("error" if self.config.deterministic else "default")
        deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a module in disguise

    def synchronize(self) -> None:
        """Wait for the device, before times are measured."""
        torch.accelerator.synchronize(self.torch_device)

    def peak_memory_bytes(self) -> int:
        """Maximum bytes of tensors so far."""
        return int(torch.get_device_module(self.torch_device).max_memory_allocated(self.torch_device))

    def matmul_precision(self, dtype: torch.dtype) -> str:
        """The precision of matrix products by the options."""
        return self.config.matmul_precision(str(dtype).removeprefix("torch."))

    def unsupported_reason(self, dtype: torch.dtype) -> str | None:
        """None: every dtype is supported."""
        return None

    def varlen_attention(self, dtype: torch.dtype) -> VarlenAttention | None:
        """None: torch's kernel is called per row, which is fastest on the CPU."""
        return None

    def dense_attention(self) -> DenseAttention | None:
        """None: transformers calls torch's attention."""
        return None

    def apply_fused_ops(self, module: nn.Module, kernels: str | None = None) -> None:
        """Say that requested kernels are not used: there are no fused operators."""
        if kernels is not None:
            self._decide("model.kernels", kernels, "none", "this device has no such kernels")


SMALLEST, LARGEST = 512, 8192  # of square matrices
LEAST_S = 1e-3  # a shorter product is mostly launch overhead: a larger one is measured
PRODUCTS, SECONDS = 20, 0.05  # maximum number and CPU time of measurements, of which the fastest counts


@dataclass(frozen=True, slots=True)
class PeakFlops:
    """flops: operations per second of matrix products; source: of the figure, as text."""

    flops: float
    source: str


def peak_flops(device: Device, dtype: torch.dtype, decide: Decide) -> PeakFlops:
    """The peak of a device for products of `dtype`. `decide` records that of an accelerator."""
    precision = device.matmul_precision(dtype)
    card = None
    if name := device.describe().get("card", ""):
        from runner.device.cards import find_card  # reads the table of cards, which a CPU does not need

        card = find_card(name)
    if card is not None and device.name == card.device and precision in card.flops:
        found = PeakFlops(card.flops[precision], f"{card.name} in {precision}, from the table of cards")
    else:
        found = PeakFlops(measure_matmul(device.torch_device, dtype), f"measured on this device in {precision}")
    if device.torch_device.type != "cpu":
        decide.record_fact("perf/mfu", f"relative to {found.flops / 1e12:.4g} TFLOP/s", found.source)
    return found


@cache
def measure_matmul(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of the fastest of some random matrix products; measured once per process.

    Uses its own random generator.
    """
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
