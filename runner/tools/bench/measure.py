"""Measures a device, and jobs on it beside their baselines, all in this process.

peak, copy  ──▶ for each case: job ──loop's own metrics──▶ speed, memory ──its batches──▶ baseline ──▶ speed

The baseline is the loop one writes by hand for the same model, in plain transformers and torch:

micro-batch ──rows side by side──▶ model(ids).logits ──cross-entropy──▶ backward … clip, AdamW

Rows are padded to the longest, a shared prompt is repeated for each of its completions, logits are whole. A reference
scores every micro-batch, completions come from `generate`. Weights are random, as the job's are.

Legend: N rows, L longest row, V vocabulary.
"""

from __future__ import annotations

import ctypes
import gc
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runner import __version__, build
from runner.core.auto_choices import Decisions
from runner.core.batch import Batch
from runner.core.micro_batches import micro_batches
from runner.core.prefix_tree import paths, rows_as_paths
from runner.core.signals import StopSignal
from runner.device.base import PeakFlops, measure_matmul, peak_flops
from runner.device.cards import GIB
from runner.interfaces import Device
from runner.model.initial_weights import DTYPES
from runner.run_dir.folder import RunFolder
from runner.run_dir.manifest import LIBRARIES
from runner.spec.job import JobSpec
from runner.tools.plan.estimate import estimate
from runner.tools.plan.traffic import compute_dtype
from runner.trainer import loop
from runner.trainer.callbacks import LogStep


class BaselineLoop:
    """One model and its optimizer; `step` does what a step of the job does with a batch."""

    def __init__(self, spec: JobSpec, device: torch.device) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        self._spec, self._device = spec, device
        assert spec.model.source is not None  # the cases write a model's folder
        config = AutoConfig.from_pretrained(spec.model.source, local_files_only=True)
        make: Any = AutoModelForCausalLM.from_config
        with torch.device(device):
            model = make(config, dtype=DTYPES[spec.stored_dtype()])
        self._reference: Any = None
        if spec.algorithm.frozen_models():
            self._reference = deepcopy(model).requires_grad_(False).to(DTYPES[spec.stored_dtype(trains=False)])
        if spec.model.gradient_checkpointing:
            # the older name, until transformers 5.5 is no longer supported
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        if not spec.adapter.trains_base:
            model = _with_adapter(spec, model)
        self.model = model.train()
        self._learning = [p for p in model.parameters() if p.requires_grad]
        own = spec.optimizer
        self._optimizer = torch.optim.AdamW(self._learning, lr=own.learning_rate, weight_decay=0.0, fused=True)

    def step(self, batch: Batch) -> None:
        """Sample if the job samples, then learn."""
        if self._spec.algorithm.needs_sampler:
            self._generate(batch)
        total = max(batch.totals["tokens"], 1)
        for micro in micro_batches(batch, self._spec.algorithm.micro_batch_budget):
            ids, mask, weight = pad_batch(micro)
            ids, mask, weight = (tensor.to(self._device, non_blocking=True) for tensor in (ids, mask, weight))
            if self._reference is not None:
                with torch.no_grad():
                    self._nll(self._reference, ids, mask)
            loss = (self._nll(self.model, ids, mask) * weight[:, 1:]).sum() / total
            loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._learning, self._spec.optimizer.clip_norm or float("inf"))
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _nll(self, model: Any, ids: Tensor, mask: Tensor) -> Tensor:
        """−log-probability of every token but the first of its row, float32 [N, L - 1]."""
        with self._precision():
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        flat = logits[:, :-1].flatten(0, 1).float()
        return F.cross_entropy(flat, ids[:, 1:].flatten(), reduction="none").view(ids.shape[0], -1)

    def _generate(self, batch: Batch) -> None:
        """As many completions of as many tokens, by transformers."""
        lengths, kinds = batch.rows["lengths"].tolist(), batch.rows["branch"].tolist()
        rows = zip(torch.split(batch.tokens["ids"], lengths), kinds, strict=True)
        prompts = [ids for ids, branch in rows if branch < 0]
        group = (len(lengths) - len(prompts)) // len(prompts)
        width = min(map(len, prompts))
        ids = torch.stack([one[-width:] for one in prompts]).repeat_interleave(group, 0).to(self._device)
        new = self._spec.sampler.answer_tokens()
        how: dict[str, Any] = {"do_sample": True, "max_new_tokens": new, "min_new_tokens": new, "pad_token_id": 0}
        self.model.eval()
        with torch.no_grad(), self._precision():
            self.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **how)
        self.model.train()

    def _precision(self) -> Any:
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._spec.model.compute_dtype == "bfloat16")


def _with_adapter(spec: JobSpec, model: Any) -> Any:
    """With the job's adapter, by peft."""
    import peft

    if spec.model.gradient_checkpointing:
        model.enable_input_require_grads()
    own: Any = spec.adapter
    targets = own.targets if isinstance(own.targets, str) else list(own.targets)
    settings = peft.LoraConfig(task_type="CAUSAL_LM", r=own.rank, lora_alpha=own.alpha, target_modules=targets)
    with warnings.catch_warnings():  # peft calls transformers by an older name
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        return peft.get_peft_model(model, settings)


def pad_batch(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """The sequences of a batch on the CPU, padded on the right: ids, mask and weights, each [N, L]."""
    tree = paths(batch) or rows_as_paths(batch)
    lengths = list(tree.lengths)
    ids, weight = (torch.split(batch.tokens[name].index_select(0, tree.index), lengths) for name in ("ids", "weight"))
    mask = [torch.ones(length, dtype=torch.int64) for length in lengths]
    padded = (nn.utils.rnn.pad_sequence(list(part), batch_first=True) for part in (ids, mask, weight))
    return tuple(padded)  # type: ignore[return-value]


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
    is_reset = _reset_peak(device)
    before = device.peak_memory_bytes()
    try:
        found, batches = _job(found, spec, folder, decide)
    except torch.OutOfMemoryError:
        return replace(found, skip_reason="out of memory")
    found = replace(found, peak_bytes=device.peak_memory_bytes() - before if is_reset else None)
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
    return f"skipped: run plan estimates {planned / GIB:.1f} GiB of tensors, {free / GIB:.1f} GiB are free"


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
    torch.set_deterministic_debug_mode("default")  # a baseline needs no more; the next job sets its own
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


def _reset_peak(device: Device) -> bool:
    """Let the largest number of bytes held begin again; returns whether that is possible here."""
    if device.torch_device.type != "cpu":
        torch.get_device_module(device.torch_device).reset_peak_memory_stats(device.torch_device)
    elif RESET_PEAK.exists():
        RESET_PEAK.write_text("5")
    else:
        return False
    return True
