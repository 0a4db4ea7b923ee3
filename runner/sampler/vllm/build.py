"""Builds the vLLM sampler of a process: checks packages, writes the model's config, starts the engine."""

from __future__ import annotations

import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch.distributed as dist

from runner.core.errors import SpecError
from runner.interfaces import Decide, GenerativeModel
from runner.interfaces.media import images_of
from runner.sampler.config import VllmSamplerConfig
from runner.sampler.vllm.arguments import EnginePlacement, engine_arguments, sleep_level
from runner.sampler.vllm.engine import VllmEngine, device_type
from runner.sampler.vllm.sampler import LoraAdapters, VllmSampler
from runner.sampler.vllm.versions import check_match, check_version, installed_version

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # as the families of models call their number
SPACE = "VLLM_CPU_KVCACHE_SPACE"  # GiB for keys and values, an older word of vLLM's


def build(
    config: VllmSamplerConfig, *, model: GenerativeModel, decide: Decide, folder: Path, longest: int
) -> VllmSampler:
    """A sampler over an engine of `model`'s shape, without weights so far.

    folder: empty, for what the engine reads from a disk, removed by close(); longest: tokens of the longest row that
    the job may need. A model on the meta device says that no trainer is on this device. Where the process is one of
    several ranks all build theirs at the same time. Raises EnvironmentProblem where vLLM is missing or does not start.
    """
    check_version(release := installed_version(), decide)
    if config.match == "batch_invariant":
        os.environ["VLLM_BATCH_INVARIANT"] = "1"  # vLLM has it as a variable alone, and reads it as it is imported
    check_match(config.match, release, device_type())
    bounds = model.limits()
    (folder / "blueprint").mkdir()
    model.save_configs(folder / "blueprint")
    adapters = LoraAdapters(folder / "blueprint" / "adapter", folder) if config.weight_sync == "adapter" else None
    most = 2**31 if bounds.length_limit is None else bounds.length_limit[0]
    placement = _make_placement(config, model, folder, min(most, config.max_model_len or longest), adapters)
    _report_choices(config, placement, decide)
    engine = VllmEngine(
        {**engine_arguments(config, placement, os.environ), **(_image_options() if placement.images else {})},
        sleep=sleep_level(config, placement),
        timeout_s=config.patience_s,
        scratch=folder,
    )
    options: dict[str, Any] = {"longest": placement.longest, "adapters": adapters, "scratch": folder}
    try:
        return VllmSampler(config, engine, bounds, model.tokenizer, **options)
    except SpecError:
        engine.close()
        raise


def _make_placement(
    config: VllmSamplerConfig, model: GenerativeModel, folder: Path, longest: int, adapters: LoraAdapters | None
) -> EnginePlacement:
    beside = model.device.type != "meta"
    return EnginePlacement(
        blueprint=folder / "blueprint",
        device=device_type(),
        dtype=config.dtype or str(model.compute_dtype).removeprefix("torch."),
        longest=longest,
        colocated=beside,
        ranks=dist.get_world_size() if beside and dist.is_initialized() else 1,
        rank=None if adapters is None else adapters.rank,
        experts=_has_experts(folder / "blueprint"),
        images=bool((reader := images_of(model.tokenizer)) and reader.how),
    )


def _image_options() -> dict[str, Any]:
    """Let the image processor normalize pixels.

    The constants of vLLM's own normalization are in the model, where dummy weights overwrite them (0.32).
    """
    from vllm.engine.arg_utils import EngineArgs

    name = "mm_device_do_normalize"
    return {name: False} if any(field.name == name for field in fields(EngineArgs)) else {}


def _has_experts(blueprint: Path) -> bool:
    """Whether the model's config counts experts."""
    config = json.loads((blueprint / "config.json").read_text())
    return any(config.get("text_config", config).get(name) for name in EXPERTS)


def _report_choices(config: VllmSamplerConfig, placement: EnginePlacement, decide: Decide) -> None:
    """What a user may not expect of the engine here."""
    if placement.colocated and placement.device == "cpu":
        decide.record_fact(
            "sampler.sleep", "0", "vLLM has no sleep mode on the CPU: the engine stays in memory during training"
        )
    if config.min_p > 0 and (config.top_p < 1 or config.top_k is not None):
        decide.record_fact(
            "sampler.min_p", str(config.min_p), "vLLM applies it before top_k and top_p, sampler=torch after them"
        )
    if placement.device == "cpu" and (space := os.environ.get(SPACE)):
        decide(
            "sampler.kv_cache_memory_bytes",
            str(config.kv_cache_memory_bytes or space),
            space,
            f"{SPACE} is set, which overrides the option in vLLM; unset it",
        )
    if placement.device == "cpu":
        decide.record_fact("sampler.packing", "off", "vLLM would keep packed copies of old weights")
