"""Measures a device, and jobs on it beside their baselines, all in this process.

peak, copy  ──▶ for each case: job ──loop's own metrics──▶ speed, memory ──its batches──▶ baseline ──▶ speed
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch

from runner import __version__, build
from runner.core.auto_choices import Decisions
from runner.core.batch import Batch
from runner.core.signals import StopSignal
from runner.device.base import PeakFlops, measure_matmul, peak_flops
from runner.device.cards import GIB
from runner.interfaces import Device
from runner.run_dir.folder import RunFolder
from runner.run_dir.resume_compatibility import LIBRARIES
from runner.spec.job import JobSpec
from runner.tools.bench.baseline import BaselineLoop
from runner.tools.plan.estimate import estimate
from runner.tools.plan.traffic import compute_dtype
from runner.trainer import loop
from runner.trainer.callbacks import LogStep

WARM_UP = 1  # steps that do not count
COPIED_BYTES = {"cpu": 64 * 2**20}  # elsewhere a quarter of a GiB
RESET_PEAK = Path("/proc/self/clear_refs")  # Linux: the largest resident set begins again


@dataclass(frozen=True, slots=True)
class CaseResult:
    """The result of one case.

    step_s: the median; baseline_s: the baseline's step on the same tokens; peak_bytes: above what was held before
    the case; planned_bytes: of tensors, by `run plan`; skip_reason: why there are no numbers, of the job or of the
    baseline.
    """

    name: str
    tokens: float = 0.0
    flops: float = 0.0
    step_s: float | None = None
    mfu: float | None = None
    baseline_s: float | None = None
    peak_bytes: int | None = None
    planned_bytes: int | None = None
    skip_reason: str | None = None

    @property
    def ratio(self) -> float | None:
        """How many times as fast as the baseline."""
        return self.baseline_s / self.step_s if self.baseline_s and self.step_s else None

    @property
    def tokens_per_s(self) -> float | None:
        """Of one device."""
        return self.tokens / self.step_s if self.step_s else None


@dataclass(frozen=True, slots=True)
class DeviceSpeed:
    """Speed of the device itself.

    peak: the reference of perf/mfu; matmul_flops: measured in the precision of the first case; copy_bytes: of its
    memory per second, read and written.
    """

    device: Mapping[str, Any]
    versions: Mapping[str, str]
    precision: str
    peak: PeakFlops
    matmul_flops: float
    copy_bytes: float


def measure_device(spec: JobSpec, device: Device, decide: Decisions) -> DeviceSpeed:
    """Measure the device of a job."""
    dtype = compute_dtype(spec)
    found = {"name": device.name, **device.describe()}
    versions = {"runner": __version__} | {name: version(name) for name in LIBRARIES}
    matmul = measure_matmul(device.torch_device, dtype)
    best = peak_flops(device, dtype, decide)
    return DeviceSpeed(found, versions, device.matmul_precision(dtype), best, matmul, copy_bandwidth(device))


def copy_bandwidth(device: Device) -> float:
    """Bytes of the device's memory that the fastest of some copies read and wrote per second."""
    size = COPIED_BYTES.get(device.torch_device.type, 2**28)
    source = torch.ones(size // 4, device=device.torch_device)
    target = torch.zeros_like(source)

    def seconds() -> float:
        device.synchronize()
        begin = time.perf_counter()
        target.copy_(source)
        device.synchronize()
        return time.perf_counter() - begin

    return 2 * size / min(seconds() for _ in range(8))


def measure_case(name: str, spec: JobSpec, folder: Path, device: Device, decide: Decisions) -> CaseResult:
    """Run one case: the job of `spec`, without its first step, then the baseline on the same batches."""
    planned = estimate(spec).peak.bytes
    found = CaseResult(name, planned_bytes=planned)
    if (shortage := _shortage(planned, device)) is not None:
        return replace(found, skip_reason=shortage)
    _release_memory()
    _reset_peak(device)
    before = device.peak_memory_bytes()
    try:
        found, batches = _job(found, spec, folder, decide)
    except torch.OutOfMemoryError:
        return replace(found, skip_reason="out of memory")
    found = replace(found, peak_bytes=device.peak_memory_bytes() - before if _can_reset_peak(device) else None)
    _release_memory()
    try:
        return replace(found, baseline_s=_measure_baseline(spec, batches, device))
    except torch.OutOfMemoryError:
        return replace(found, skip_reason="baseline: out of memory")
    finally:
        _release_memory()


def _shortage(planned: int, device: Device) -> str | None:
    """Why a case with so many bytes of tensors is not tried."""
    if device.torch_device.type == "cpu":
        return None
    free, _ = torch.get_device_module(device.torch_device).mem_get_info(device.torch_device)
    if planned <= free:
        return None
    return f"left out: {planned / GIB:.1f} GiB of tensors by run plan, {free / GIB:.1f} GiB are free"


def _job(found: CaseResult, spec: JobSpec, folder: Path, decide: Decisions) -> tuple[CaseResult, list[Batch]]:
    lines: list[Mapping[str, float]] = []
    batches: list[Batch] = []
    run_folder = RunFolder(folder)
    built = build.build(
        spec, run_folder, build.build_store(spec, run_folder), decide, StopSignal(), build.OutputSinks()
    )
    count = built.job.flops["policy"]

    def count_and_keep(batch: Batch) -> float:
        batches.append(batch)
        return count(batch)

    record = LogStep([lambda step, values: lines.append(dict(values))])
    job = replace(built.job, callbacks=[record], flops={"policy": count_and_keep})
    loop.run_loop(job, 0)
    measured_lines = lines[WARM_UP:]
    step_s = median(line["perf/step_s"] for line in measured_lines)
    flops = median(line["perf/model_flops"] for line in measured_lines)
    tokens = median(float(batch.num_tokens) for batch in batches[WARM_UP:])
    mfu = flops / step_s / job.peak_flops
    return replace(found, tokens=tokens, flops=flops, step_s=step_s, mfu=mfu), batches


def _measure_baseline(spec: JobSpec, batches: Sequence[Batch], device: Device) -> float:
    """Seconds of the baseline's step, the median."""
    torch.set_deterministic_debug_mode("default")  # nobody asks a baseline for more; the next job sets its own
    baseline, seconds = BaselineLoop(spec, device.torch_device), []
    for batch in batches:
        device.synchronize()
        begin = time.perf_counter()
        baseline.step(batch)
        device.synchronize()
        seconds.append(time.perf_counter() - begin)
    return median(seconds[WARM_UP:])


def _release_memory() -> None:
    """Give back what the case before held."""
    gc.collect()
    with suppress(AttributeError):  # of other C libraries than GNU's, which keeps what was freed
        ctypes.CDLL(None).malloc_trim(0)
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def _can_reset_peak(device: Device) -> bool:
    return device.torch_device.type != "cpu" or RESET_PEAK.exists()


def _reset_peak(device: Device) -> None:
    """Let the largest number of bytes held begin again."""
    if device.torch_device.type != "cpu":
        torch.get_device_module(device.torch_device).reset_peak_memory_stats(device.torch_device)
    elif RESET_PEAK.exists():
        RESET_PEAK.write_text("5")
