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
CPU_CACHE_GIB = 1.0
STEP_TOKENS = 4096  # that an engine computes at once, on the CPU


@dataclass(frozen=True, slots=True)
class Home:
    """Where an engine lives.

    blueprint: folder of the model's config and tokenizer; device: as torch calls its kind; dtype: as torch calls it
    longest: most tokens of a prompt and its answer; beside: whether a trainer has the same device, with `ranks` in its
    world, each of which has an engine; rank: of the adapter that comes by itself, None where none does; experts:
    whether the model has layers of them
    """

    blueprint: Path
    device: str
    dtype: str
    longest: int
    beside: bool
    ranks: int = 1
    rank: int | None = None
    experts: bool = False


def arguments(config: VllmSamplerConfig, home: Home, environment: Mapping[str, str]) -> dict[str, Any]:
    """The keywords of vllm.LLM. Raises EnvironmentProblem for what vllm-ascend cannot work in, and for an adapter of a
    rank that vLLM has no room for."""
    sleeps, kind = sleep_level(config, home) > 0, find_kind(home.device)
    own = resolve(kind.engine_options)(environment, sleeps, home.experts) if kind.engine_options else {}
    return {
        "model": str(home.blueprint),
        "skip_tokenizer_init": not config.stop,
        "load_format": "dummy",
        "generation_config": "vllm",  # and not the model's own, which would change what is drawn
        "dtype": home.dtype,
        "seed": 0,
        "max_model_len": home.longest,
        "max_num_seqs": config.batch_size,
        "logprobs_mode": "processed_logprobs",  # of what was really drawn from
        "enable_prefix_caching": True,
        "enforce_eager": not kind.engine_graphs if config.eager is None else config.eager,
        "tensor_parallel_size": config.tp,
        "worker_extension_cls": "runner.sampler.vllm.worker.Loading",
        "disable_log_stats": True,
        **_memory(config, home),
        **(_on_the_cpu(home) if home.device == "cpu" else {}),
        **({"enable_sleep_mode": True} if sleeps and home.device != "cpu" else {}),
        **({"distributed_executor_backend": "external_launcher"} if home.ranks > 1 else {}),
        **(_adapters(home.rank) if home.rank is not None else {}),
        **own,
    }


def sleep_level(config: VllmSamplerConfig, home: Home) -> int:
    """How deep the engine sleeps while the trainer on its device works."""
    if config.sleep is not None:
        return config.sleep
    return 1 if home.beside and home.device != "cpu" else 0


def _memory(config: VllmSamplerConfig, home: Home) -> dict[str, Any]:
    cache = config.cache_gib or (CPU_CACHE_GIB if home.device == "cpu" else None)
    share = config.memory or (BESIDE if home.beside else ALONE)
    found: dict[str, Any] = {} if home.device == "cpu" else {"gpu_memory_utilization": share}
    return found if cache is None else {**found, "kv_cache_memory_bytes": int(cache * 2**30)}


def _on_the_cpu(home: Home) -> dict[str, Any]:
    """Prompts are taken whole: with a part of one vLLM turns the request's random stream back, and the processor's
    cannot be (0.32: RuntimeError, CPU Generator does not use offset)."""
    return {"enable_chunked_prefill": False, "max_num_batched_tokens": max(home.longest, STEP_TOKENS)}


def _adapters(rank: int) -> dict[str, Any]:
    room = next((known for known in RANKS if known >= rank), None)
    if room is None:
        text = f"adapter.rank={rank}, and vLLM has room for {RANKS[-1]}; type sampler.sync=merged"
        raise EnvironmentProblem(f"sampler.sync=adapter: {text}")
    return {"enable_lora": True, "max_lora_rank": room, "max_loras": 1}
