"""Builds the vLLM sampler of a process: checks what is installed, writes the model's blueprint, starts the engine."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from runner.core.errors import SpecError
from runner.interfaces import Bounds, Decide
from runner.sampler.config import VllmSamplerConfig
from runner.sampler.vllm.arguments import Home, arguments, sleep_level
from runner.sampler.vllm.engine import Engine, device_type
from runner.sampler.vllm.sampler import Adapters, VllmSampler
from runner.sampler.vllm.versions import check, installed

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # as the families of models call their number
SPACE = "VLLM_CPU_KVCACHE_SPACE"  # GiB for keys and values, an older word of vLLM's


class Modelled(Protocol):
    """What is needed of a model: on torch's meta device it is enough."""

    tokenizer: Any

    @property
    def device(self) -> torch.device: ...

    @property
    def compute_type(self) -> torch.dtype: ...

    def bounds(self) -> Bounds: ...

    def blueprint(self, folder: Path) -> None: ...


def build(config: VllmSamplerConfig, *, model: Modelled, decide: Decide, folder: Path, longest: int) -> VllmSampler:
    """A sampler over an engine of `model`'s shape, without weights so far.

    folder: empty, for what the engine reads from a disk, removed by close(); longest: tokens of the longest row that
    the job may need. A model on the meta device says that no trainer is on this device. Where the process is one of
    several ranks all build theirs at the same time. Raises EnvironmentProblem where vLLM is missing or does not start.
    """
    check(installed(), decide)
    bounds = model.bounds()
    (folder / "blueprint").mkdir()
    model.blueprint(folder / "blueprint")
    adapters = Adapters(folder / "blueprint" / "adapter", folder) if config.sync == "adapter" else None
    home = _home(config, model, folder, min(_most(bounds), config.max_length or longest), adapters)
    _say(config, home, decide)
    engine = Engine(
        arguments(config, home, os.environ),
        sleep=sleep_level(config, home),
        timeout_s=config.patience_s,
        scratch=folder,
    )
    options: dict[str, Any] = {"longest": home.longest, "adapters": adapters, "scratch": folder}
    try:
        return VllmSampler(config, engine, bounds, model.tokenizer, **options)
    except SpecError:
        engine.close()
        raise


def _most(bounds: Bounds) -> int:
    return 2**31 if bounds.longest is None else bounds.longest[0]


def _home(config: VllmSamplerConfig, model: Modelled, folder: Path, longest: int, adapters: Adapters | None) -> Home:
    beside = model.device.type != "meta"
    return Home(
        blueprint=folder / "blueprint",
        device=device_type(),
        dtype=config.dtype or str(model.compute_type).removeprefix("torch."),
        longest=longest,
        beside=beside,
        ranks=dist.get_world_size() if beside and dist.is_initialized() else 1,
        rank=None if adapters is None else adapters.rank,
        experts=_has_experts(folder / "blueprint"),
    )


def _has_experts(blueprint: Path) -> bool:
    """Whether the model's config counts experts."""
    config = json.loads((blueprint / "config.json").read_text())
    return any(config.get("text_config", config).get(name) for name in EXPERTS)


def _say(config: VllmSamplerConfig, home: Home, decide: Decide) -> None:
    """What a user may not expect of the engine here."""
    if home.beside and home.device == "cpu":
        decide.state("sampler.sleep", "0", "vLLM knows no sleep on the CPU: the engine stays in memory while training")
    if config.min_p > 0 and (config.top_p < 1 or config.top_k is not None):
        decide.state("sampler.min_p", str(config.min_p), "vLLM cuts by it before top_k and top_p, sampler=torch after")
    if home.device == "cpu" and (space := os.environ.get(SPACE)):
        decide(
            "sampler.cache_gib", str(config.cache_gib or space), space, f"{SPACE} is set, which vLLM heeds before all"
        )
    if home.device == "cpu":
        decide.state("sampler.packing", "off", "vLLM would keep packed copies of old weights (a tied LM head's unseen)")
