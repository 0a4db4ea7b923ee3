"""What drawing rollouts takes: of ranks that also train, or of devices that only sample.

launch.samplers   sampler        who holds what for it
0                 torch          the ranks: keys and values, logits, gathered weights     while they sample
0                 vllm           the ranks: an engine beside the trainer                  while they sample, or always
M                 torch, vllm    M devices: a copy of the model, keys and values          always; the ranks nothing
any               vllm_server    somebody else
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, lcm
from typing import Any

from runner.device.cards import GIB, Card
from runner.model.build import DTYPES
from runner.model.flops import head_size
from runner.sampler.vllm.arguments import ALONE, BESIDE
from runner.spec.job import JobSpec
from runner.tools.plan.measure import longest
from runner.tools.plan.spread import Part, Spread, Term, Weights
from runner.tools.plan.traffic import compute_dtype, peak_flops

ENGINE = "the engine's weights"
POOL = "the engine's keys and values"


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine over `cards` devices. weights, pool: bytes of one device; rows: of the longest answers with their
    prompts, for whose keys and values the pool has room; wanted: those that are in work at once; tokens: of one."""

    cards: int
    weights: int
    pool: int
    rows: int
    wanted: int
    tokens: int

    def terms(self) -> list[Term]:
        """What it takes of a device."""
        return [Term(ENGINE, self.weights, pooled=True), Term(POOL, self.pool, pooled=True)]


@dataclass(frozen=True, slots=True)
class Samplers:
    """Devices that only sample. terms: what one of them holds."""

    devices: int
    cards: int
    terms: Sequence[Term]

    @property
    def count(self) -> int:
        """Processes, each over `cards` devices."""
        return self.devices // self.cards

    @property
    def bytes(self) -> int:
        """What one device holds."""
        return sum(term.bytes for term in self.terms)


def by_the_model(spec: JobSpec, shape: Any, drawing: int) -> list[Term]:
    """What the model itself needs beside its weights, as one of so many that draw."""
    rows, inner, dtype = at_once(spec, drawing), shape.get_text_config(), compute_dtype(spec)
    return [
        Term("keys and values", rows * longest(spec) * token_bytes(shape, dtype.itemsize)),
        Term("logits", rows * inner.vocab_size * (dtype.itemsize + 4)),
    ]


def engine_of(spec: JobSpec, shape: Any, whole: Mapping[str, Weights], card: Card | None) -> Engine | None:
    """The engine of a job with sampler=vllm; None for any other. On no known card it has what the answers need."""
    config, size = spec.sampler, _sent_size(spec)
    if not config.starts_engine or size is None:
        return None
    cards, adapter_alone = config.cards(), "adapter" in config.sent()
    kept = next(iter(whole.values()))
    numbers = kept.all.frozen if adapter_alone else kept.total - _adapted(spec, kept)
    weights = ceil(numbers * size / cards) + (kept.all.trained * size if adapter_alone else 0)
    row = longest(spec) * token_bytes(shape, size, cards)
    wanted = at_once(spec, drawing(spec))
    pool = wanted * row if card is None else max(0, round(share_of(spec) * card.memory) - weights)
    pool = pool if config.cache_size_gib is None else round(config.cache_size_gib * GIB)
    return Engine(cards, weights, pool, pool // row, wanted, longest(spec))


def share_of(spec: JobSpec) -> float:
    """The share of a card that an engine takes."""
    return spec.sampler.memory_share or (ALONE if spec.launch.samplers else BESIDE)


def asleep(spec: JobSpec) -> int:
    """What an engine beside a rank gives up while that trains, as `sampler.sleep` says it."""
    config = spec.sampler
    if not config.starts_engine or spec.launch.samplers:
        return 0
    return int(not spec.device.is_cpu) if config.sleep_level is None else config.sleep_level


def samplers_of(spec: JobSpec, shape: Any, whole: Mapping[str, Weights], engine: Engine | None) -> Samplers | None:
    """The devices that only sample; None where there are none."""
    if not spec.launch.samplers:
        return None
    terms = engine.terms() if engine else []
    if not engine:
        model = next(iter(whole.values()))
        terms = [Term("weights", model.all.bytes), *by_the_model(spec, shape, drawing(spec))]
    return Samplers(spec.launch.samplers, spec.sampler.cards(), terms)


def drawing(spec: JobSpec) -> int:
    """How many draw: processes that only sample, or ranks."""
    return spec.launch.samplers // spec.sampler.cards() if spec.launch.samplers else spec.launch.world


def answers(spec: JobSpec) -> int:
    """Answers of a step."""
    return spec.algorithm.batch_size * spec.algorithm.samples_per_prompt


def at_once(spec: JobSpec, drawing: int) -> int:
    """Answers that one of so many that draw has in work at once."""
    share = ceil(answers(spec) / drawing)
    return share if spec.sampler.max_concurrent is None else min(share, spec.sampler.max_concurrent)


def token_bytes(shape: Any, size: int, slices: int = 1) -> int:
    """Bytes of a token's keys and values on one of so many slices, whose heads are repeated where they are too few."""
    inner = shape.get_text_config()
    heads = lcm(inner.num_key_value_heads, slices) // slices
    return int(2 * inner.num_hidden_layers * heads * head_size(inner) * size)


def _adapted(spec: JobSpec, model: Weights) -> int:
    """Numbers of an adapter, which an engine gets merged into its base."""
    return 0 if spec.adapter.trains_base else model.all.trained


def shelf_of(spec: JobSpec, whole: Mapping[str, Weights], spread: Spread) -> list[Term]:
    """What lies in the memory of rank 0's machine for samplers to read, or of every machine whose ranks have engines:
    what all versions share, and as many versions as the lag, and a server, need. Nothing where they read the rank's own
    tensors."""
    apart, ahead = spec.launch.samplers > 0 or spec.sampler.served, spec.algorithm.steps_ahead()
    ways = spec.sampler.sent()
    by_reference = not apart and spread.mesh.world == spread.mesh.data and not spread.sharded
    if not (ways or spec.launch.samplers) or (by_reference and spec.adapter.trains_base):
        return []
    model, size = next(iter(whole.values())), _sent_size(spec)
    changed, fixed = (_sent(spec, model, size, way) for way in (*(ways or ("adapter",)), None)[:2])
    beside = spec.sampler.copies()
    said = "the weights after a step" if ahead == 0 else f"the weights after each of {ahead + 1} steps"
    said += ", and what the server has of them" if beside else ""
    return [Term(said + (", and those that none changes" if fixed else ""), fixed + (ahead + 1 + beside) * changed)]


def _sent_size(spec: JobSpec) -> int | None:
    """Bytes of a number that is sent to an engine of ours; None = as the model has it."""
    products = next(name for name, dtype in DTYPES.items() if dtype == compute_dtype(spec))
    dtype = spec.sampler.weights_dtype(products)
    return None if dtype is None else DTYPES[dtype].itemsize


def _sent(spec: JobSpec, model: Weights, size: int | None, way: str | None) -> int:
    """Bytes of what is sent in this way, None = nothing. An adapter may change all layers that it is merged into; what
    learns, "adapter", is all of a model that has none."""
    adapted = not spec.adapter.trains_base
    layers = sum((*model.layers, *model.experts), Part())
    parts = {
        "adapter": Part(model.all.trained, 0, model.all.trained_bytes),
        "base": Part(0, model.all.frozen, 0, model.all.frozen_bytes),
        "changed": Part(0, layers.frozen, 0, layers.frozen_bytes) if adapted else model.all,
        "fixed": Part(0, model.all.frozen - layers.frozen, 0, model.all.frozen_bytes - layers.frozen_bytes),
    }
    if way is None:
        return 0
    part = parts[way]
    return part.bytes if size is None else size * (part.trained + part.frozen)


def least_seconds(spec: JobSpec, whole: Mapping[str, Weights], card: Card | None) -> float | None:
    """Below this many seconds no card samples a step whose answers are all of the greatest length: every token after
    the first reads all weights that multiply, once for the answers in work at once, and computes with each of them.
    None where the card's figures are not known, or a server samples (Kwon et al., 2309.06180, section 2.2: reading is
    what takes time)."""
    peak = peak_flops(spec, card)
    if card is None or card.bandwidth is None or peak is None or spec.sampler.served:
        return None
    many = drawing(spec)
    rows, share = at_once(spec, many), ceil(answers(spec) / many)
    numbers = next(iter(whole.values())).flops.weights.total / spec.sampler.cards()
    reading = numbers * compute_dtype(spec).itemsize / card.bandwidth
    tokens = spec.sampler.answer_tokens() - 1
    return tokens * max(share // rows * reading, 2 * numbers * share / peak)
