"""What a vLLM engine is built with: pure, so that it can be read and tested without one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.core.device_kinds import find_kind
from runner.core.errors import EnvironmentProblem
from runner.sampler.config import VllmSamplerConfig
from runner.spec.registry import resolve

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # of adapters, that vLLM makes room for
BESIDE, ALONE = 0.45, 0.9  # of a card's memory: with a trainer on it, and without
CPU_CACHE_BYTES = 2**30
STEP_TOKENS = 4096  # that an engine computes at once, on the CPU


@dataclass(frozen=True, slots=True)
class EnginePlacement:
    """Where an engine lives.

    blueprint: folder of the model's config and tokenizer; device: as torch calls its kind; dtype: as torch calls it
    longest: most tokens of a prompt and its answer; beside: whether a trainer has the same device, with `ranks` in its
    world, each of which has an engine; rank: of the adapter that comes by itself, None where none does; experts:
    whether the model has layers of them; images: whether it reads any
    """

    blueprint: Path
    device: str
    dtype: str
    longest: int
    colocated: bool
    ranks: int = 1
    rank: int | None = None
    experts: bool = False
    images: bool = False


def engine_arguments(
    config: VllmSamplerConfig, placement: EnginePlacement, environment: Mapping[str, str]
) -> dict[str, Any]:
    """The keywords of vllm.LLM. Raises EnvironmentProblem.

    For what vllm-ascend does not support, and for an adapter rank above vLLM's maximum.
    """
    sleeps, kind = sleep_level(config, placement) > 0, find_kind(placement.device)
    own = resolve(kind.engine_options)(environment, sleeps, placement.experts) if kind.engine_options else {}
    return {
        "model": str(placement.blueprint),
        "skip_tokenizer_init": not (config.stop or placement.images),
        "load_format": "dummy",
        "generation_config": "vllm",  # and not the model's own, which would change what is drawn
        "dtype": placement.dtype,
        "seed": 0,
        "max_model_len": placement.longest,
        "max_num_seqs": config.max_num_seqs,
        "logprobs_mode": logprobs_mode(config),
        "enable_prefix_caching": True,
        "enforce_eager": not kind.engine_graphs if config.enforce_eager is None else config.enforce_eager,
        "tensor_parallel_size": config.tensor_parallel_size,
        "worker_extension_cls": "runner.sampler.vllm.worker.WeightLoader",
        "disable_log_stats": True,
        **({"hf_overrides": {"head_dtype": "float32"}} if config.match == "fp32_head" else {}),
        **_memory_options(config, placement),
        **(_cpu_options(placement) if placement.device == "cpu" else {}),
        **({"enable_sleep_mode": True} if sleeps and placement.device != "cpu" else {}),
        **({"distributed_executor_backend": "external_launcher"} if placement.ranks > 1 else {}),
        **(_lora_options(placement.rank) if placement.rank is not None else {}),
        **own,
    }


def logprobs_mode(config: VllmSamplerConfig) -> str:
    """vLLM's mode for log-probabilities at the sampling temperature, before truncation, where it has one.

    raw_logprobs are taken before temperature and truncation, processed_logprobs after both; between them there is none.
    """
    return "raw_logprobs" if config.truncates and config.temperature == 1 else "processed_logprobs"


def reports_raw_logprobs(config: VllmSamplerConfig) -> bool:
    """Whether the reported log-probabilities are those before truncation, which a ratio is taken to."""
    return not config.truncates or config.temperature == 1


def sleep_level(config: VllmSamplerConfig, placement: EnginePlacement) -> int:
    """How deep the engine sleeps while the trainer on its device works."""
    if config.sleep is not None:
        return config.sleep
    return 1 if placement.colocated and placement.device != "cpu" else 0


def _memory_options(config: VllmSamplerConfig, placement: EnginePlacement) -> dict[str, Any]:
    cache = config.kv_cache_memory_bytes or (CPU_CACHE_BYTES if placement.device == "cpu" else None)
    share = config.gpu_memory_utilization or (BESIDE if placement.colocated else ALONE)
    found: dict[str, Any] = {} if placement.device == "cpu" else {"gpu_memory_utilization": share}
    return found if cache is None else {**found, "kv_cache_memory_bytes": cache}


def _cpu_options(placement: EnginePlacement) -> dict[str, Any]:
    """Options for the CPU: prompts are not chunked.

    vLLM rewinds a request's random generator for a part of a prompt, which a CPU generator does not support (0.32).
    """
    return {"enable_chunked_prefill": False, "max_num_batched_tokens": max(placement.longest, STEP_TOKENS)}


def _lora_options(rank: int) -> dict[str, Any]:
    room = next((known for known in RANKS if known >= rank), None)
    if room is None:
        text = f"adapter.rank={rank} is above vLLM's maximum of {RANKS[-1]}; type sampler.weight_sync=merged"
        raise EnvironmentProblem(f"sampler.weight_sync=adapter: {text}")
    return {"enable_lora": True, "max_lora_rank": room, "max_loras": 1}
