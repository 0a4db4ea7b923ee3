"""What drawing rollouts takes: of ranks that also train, or of devices that only sample.

launch.samplers   sampler        who holds what for it
0                 torch          the ranks: keys and values, logits, gathered weights     while they sample
0                 vllm           the ranks: an engine beside the trainer                  while they sample, or always
M                 torch, vllm    M devices: a copy of the model, keys and values          always; the ranks nothing
any               server         somebody else
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, lcm
from typing import Any

from runner.device.cards import Card
from runner.model.flops import key_value_size, num_kv_heads
from runner.model.initial_weights import DTYPES
from runner.sampler.vllm.arguments import ALONE, BESIDE
from runner.spec.job import JobSpec
from runner.tools.plan.measure import longest_row_tokens
from runner.tools.plan.rank_layout import MemoryTerm, ModelWeights, ParameterCount, RankLayout
from runner.tools.plan.traffic import compute_dtype, peak_flops

ENGINE = "the engine's weights"
POOL = "the engine's KV cache"
# model types of which vLLM keeps latents (`is_deepseek_mla`, 0.23 and later); of others it keeps keys and values
LATENT_IN_VLLM = (
    *("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "kimi_linear", "longcat_flash"),
)


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Memory of an engine over `cards` devices.

    weights, pool: bytes of one device; rows: number of longest answers with prompts whose keys and values fit the pool;
    wanted: maximum concurrent answers; tokens: of one.
    """

    cards: int
    weights: int
    pool: int
    rows: int
    wanted: int
    tokens: int

    def terms(self) -> list[MemoryTerm]:
        """What it takes of a device."""
        return [MemoryTerm(ENGINE, self.weights, pooled=True), MemoryTerm(POOL, self.pool, pooled=True)]


@dataclass(frozen=True, slots=True)
class SamplerDevices:
    """Devices that only sample. terms: what one of them holds."""

    devices: int
    cards: int
    terms: Sequence[MemoryTerm]

    @property
    def count(self) -> int:
        """Processes, each over `cards` devices."""
        return self.devices // self.cards

    @property
    def bytes(self) -> int:
        """What one device holds."""
        return sum(term.bytes for term in self.terms)


def torch_sampler_terms(spec: JobSpec, shape: Any, drawing: int) -> list[MemoryTerm]:
    """What the model itself needs beside its weights, as one of so many that draw."""
    rows, inner, dtype = concurrent_answers(spec, drawing), shape.get_text_config(), compute_dtype(spec)
    return [
        MemoryTerm("keys and values", rows * longest_row_tokens(spec, shape) * token_bytes(shape, dtype.itemsize)),
        MemoryTerm("logits", rows * inner.vocab_size * (dtype.itemsize + 4)),
    ]


def engine_memory(
    spec: JobSpec, shape: Any, whole: Mapping[str, ModelWeights], card: Card | None
) -> EngineMemory | None:
    """The engine of a job with sampler=vllm, else None. Without a known card it has what answers need."""
    config, size = spec.sampler, _sent_item_size(spec)
    if not config.starts_engine or size is None:
        return None
    cards, adapter_alone = config.cards(), "adapter" in config.weights_to_send()
    kept = next(iter(whole.values()))
    is_merged = not spec.adapter.trains_base  # an engine gets an adapter merged into its base
    numbers = kept.all.frozen if adapter_alone or is_merged else kept.total
    weights = ceil(numbers * size / cards) + (kept.all.trained * size if adapter_alone else 0)
    longest = longest_row_tokens(spec, shape)
    row = longest * token_bytes(shape, size, cards, engine=True)
    wanted = concurrent_answers(spec, sampling_processes(spec))
    pool = wanted * row if card is None else max(0, round(engine_share(spec) * card.memory) - weights)
    pool = config.kv_cache_bytes or pool
    return EngineMemory(cards, weights, pool, pool // row, wanted, longest)


def engine_share(spec: JobSpec) -> float:
    """The share of a card that an engine takes."""
    return spec.sampler.memory_share or (ALONE if spec.launch.samplers else BESIDE)


def engine_sleep_level(spec: JobSpec) -> int:
    """What an engine beside a rank gives up while that trains, as `sampler.sleep` says it."""
    config = spec.sampler
    if not config.starts_engine or spec.launch.samplers:
        return 0
    return int(not spec.device.is_cpu) if config.sleep_level is None else config.sleep_level


def sampler_devices(
    spec: JobSpec, shape: Any, whole: Mapping[str, ModelWeights], engine: EngineMemory | None
) -> SamplerDevices | None:
    """The devices that only sample; None where there are none."""
    if not spec.launch.samplers:
        return None
    terms = engine.terms() if engine else []
    if not engine:
        model = next(iter(whole.values()))
        terms = [MemoryTerm("weights", model.all.bytes), *torch_sampler_terms(spec, shape, sampling_processes(spec))]
    return SamplerDevices(spec.launch.samplers, spec.sampler.cards(), terms)


def sampling_processes(spec: JobSpec) -> int:
    """How many draw: processes that only sample, or ranks."""
    return spec.launch.samplers // spec.sampler.cards() if spec.launch.samplers else spec.launch.world


def answers_per_step(spec: JobSpec) -> int:
    """Answers of a step."""
    return spec.algorithm.batch_size * spec.algorithm.samples_per_prompt


def concurrent_answers(spec: JobSpec, drawing: int) -> int:
    """Answers that one of so many that draw has in work at once."""
    share = ceil(answers_per_step(spec) / drawing)
    return share if spec.sampler.max_concurrent is None else min(share, spec.sampler.max_concurrent)


def token_bytes(shape: Any, size: int, slices: int = 1, *, engine: bool = False) -> int:
    """Bytes of a token's keys and values on one of `slices` ranks; too few heads are replicated.

    Multi-head latent attention (2405.04434, section 2.1) keeps latents, whole on every rank. An `engine`
    computes with these; otherwise keys and values are made of them, one layer at a time.
    """
    inner = shape.get_text_config()
    layers, latent = inner.num_hidden_layers, getattr(inner, "kv_lora_rank", None)
    whole = lcm(num_kv_heads(inner), slices) // slices * key_value_size(inner)  # numbers of a layer
    if latent is None or (engine and inner.model_type not in LATENT_IN_VLLM):
        return int(layers * whole * size)
    return int((layers * (latent + inner.qk_rope_head_dim) + (0 if engine else whole)) * size)


def shared_memory_terms(spec: JobSpec, whole: Mapping[str, ModelWeights], spread: RankLayout) -> list[MemoryTerm]:
    """Weights for samplers in the memory of rank 0's machine, or of every machine with engines.

    What all versions share, and as many versions as the lag, and a server, need. Nothing where samplers read the rank's
    own tensors.
    """
    apart, ahead = spec.launch.samplers > 0 or spec.sampler.served, spec.algorithm.steps_ahead()
    ways = spec.sampler.weights_to_send()
    by_reference = not apart and spread.mesh.world_size == spread.mesh.dp_size and not spread.is_sharded
    if not (ways or spec.launch.samplers) or (by_reference and spec.adapter.trains_base):
        return []
    model, size = next(iter(whole.values())), _sent_item_size(spec)
    changed, fixed = (_sent_bytes(spec, model, size, way) for way in (*(ways or ("adapter",)), None)[:2])
    beside = spec.sampler.extra_weight_copies()
    said = "the weights after a step" if ahead == 0 else f"the weights after each of {ahead + 1} steps"
    said += ", and the server's copies" if beside else ""
    return [MemoryTerm(said + (", and the constant ones" if fixed else ""), fixed + (ahead + 1 + beside) * changed)]


def _sent_item_size(spec: JobSpec) -> int | None:
    """Bytes of a number that is sent to an engine of ours; None = as the model has it."""
    products = next(name for name, dtype in DTYPES.items() if dtype == compute_dtype(spec))
    dtype = spec.sampler.weights_dtype(products)
    return None if dtype is None else DTYPES[dtype].itemsize


def _sent_bytes(spec: JobSpec, model: ModelWeights, size: int | None, way: str | None) -> int:
    """Bytes of the weights that are sent in this way, None = nothing.

    An adapter may change all layers that it is merged into; without one, "adapter" is the whole model.
    """
    adapted = not spec.adapter.trains_base
    layers = sum((*model.layers, *model.experts), ParameterCount())
    parts = {
        "adapter": ParameterCount(model.all.trained, 0, model.all.trained_bytes),
        "base": ParameterCount(0, model.all.frozen, 0, model.all.frozen_bytes),
        "changed": ParameterCount(0, layers.frozen, 0, layers.frozen_bytes) if adapted else model.all,
        "fixed": ParameterCount(0, model.all.frozen - layers.frozen, 0, model.all.frozen_bytes - layers.frozen_bytes),
    }
    if way is None:
        return 0
    part = parts[way]
    return part.bytes if size is None else size * (part.trained + part.frozen)


def min_sampling_seconds(
    spec: JobSpec, shape: Any, whole: Mapping[str, ModelWeights], card: Card | None
) -> float | None:
    """Lower bound of seconds to sample a step whose answers are all of maximum length; None if unknown.

    Every token after the first of a turn reads all weights, once for concurrent answers, and computes with each of
    them. None where the card's figures are not known, or a server samples (Kwon et al., 2309.06180, section 2.2).
    """
    peak = peak_flops(spec, card)
    if card is None or card.bandwidth is None or peak is None or spec.sampler.served:
        return None
    many = sampling_processes(spec)
    rows, share = concurrent_answers(spec, many), ceil(answers_per_step(spec) / many)
    numbers = next(iter(whole.values())).flops.weights.total / spec.sampler.cards()
    reading = numbers * compute_dtype(spec).itemsize / card.bandwidth
    turns = spec.environment.most_turns()
    written = min(spec.sampler.answer_tokens() * turns, spec.episode_tokens(), longest_row_tokens(spec, shape))
    tokens = max(0, written - turns)
    return tokens * max(share // rows * reading, 2 * numbers * share / peak)
