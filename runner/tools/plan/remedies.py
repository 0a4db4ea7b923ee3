"""What to change so that a job fits: one change if one is enough, cheapest first, else several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runner.core.errors import SpecError
from runner.device.cards import Card
from runner.parallelism.mesh import model_sizes
from runner.sampler.vllm.arguments import ALONE
from runner.spec.job import JobSpec
from runner.spec.registry import default_registry
from runner.tools.plan.estimate import MemoryBand, estimate
from runner.tools.plan.measure import longest_unit_tokens
from runner.tools.plan.model import architecture
from runner.tools.plan.rollout_memory import engine_share, engine_sleep_level

LEAST_CHUNK = 256  # tokens of the LM head's chunks; with fewer, starting the products costs more than they do


@dataclass(frozen=True, slots=True)
class Change:
    """Options to be typed, the job with them, and what they cost."""

    word: str
    spec: JobSpec
    cost: str


Step = Callable[[JobSpec], Iterator[Change]]


def smaller_chunks(spec: JobSpec) -> Iterator[Change]:
    """Fewer logits at once."""
    yield from _halving(spec, "model.lm_head_chunk_tokens", LEAST_CHUNK, "the same update, a few percent slower")


def fewer_answers(spec: JobSpec) -> Iterator[Change]:
    """Fewer rows that are written at once."""
    if spec.algorithm.needs_sampler:
        yield from _halving(spec, "sampler.max_num_seqs", 8, "the same completions, fewer at once")


def sleeping_engines(spec: JobSpec) -> Iterator[Change]:
    """An engine that frees its memory while its rank trains."""
    if spec.sampler.starts_engine and not spec.launch.samplers and not engine_sleep_level(spec):
        yield from _setting(spec, "sampler.sleep", 1, "the same completions; the engine wakes up in every step")


def engine_memory_share(spec: JobSpec) -> Iterator[Change]:
    """Less of a card for an engine beside a rank; all that can be had for one on devices of its own."""
    if not spec.sampler.starts_engine or spec.device.is_cpu:
        return
    share, own = engine_share(spec), spec.launch.samplers > 0
    cost = "the same completions, fewer at once where keys and values have less room"
    for least in (ALONE,) if own else (0.4, 0.3, 0.2, 0.1):
        if (least > share) == own and least != share:
            changed = _with_option(
                _with_option(spec, "sampler.gpu_memory_utilization", least), "sampler.kv_cache_memory_bytes", None
            )
            yield Change(f"sampler.gpu_memory_utilization={least}", changed, "less free memory" if own else cost)


def smaller_micro_batches(spec: JobSpec) -> Iterator[Change]:
    """Fewer tokens at once, down to one row or pair."""
    cost = "the same update; lower device utilization"
    longest = longest_unit_tokens(spec, architecture(spec.model)[0])
    yield from _halving(spec, "algorithm.micro_batch_tokens", longest, cost)


def sharding(spec: JobSpec) -> Iterator[Change]:
    """Weights in pieces; over several machines only within each, with a run of the layers on each."""
    kinds = default_registry().classes("parallelism")
    mesh = spec.parallelism.mesh(spec.launch.world)
    if "fsdp" not in kinds or spec.launch.world == 1 or mesh.dp_shard > 1:
        return
    if (nodes := spec.launch.machines) > 1 and spec.launch.devices > 1 and mesh.world_size == mesh.dp_size:
        cost = "the same update; layers are gathered within a machine, hidden states are sent between machines"
        yield from _with_mesh(spec, {"pp": nodes}, cost, "fsdp")
    kept = {name: size for name, size in mesh.dims.items() if name in ("pp", "cp", "tp") and size > 1}
    cost = "the same update; layers are gathered from the devices in every pass"
    yield from _with_mesh(spec, kept, cost, "fsdp")


def spreading_experts(spec: JobSpec) -> Iterator[Change]:
    """Experts on several ranks."""
    mesh = spec.parallelism.mesh(spec.launch.world)
    experts = model_sizes(architecture(spec.model)[0]).get("experts", ("", 0))[1]
    if experts and mesh.ep == 1:
        for ranks in _divisors(mesh.dp_cp_size):
            cost = "the same update; tokens are sent to their experts"
            yield from _with_mesh(spec, {"ep": ranks} if experts % ranks == 0 else {}, cost)


def sharing_rows(spec: JobSpec) -> Iterator[Change]:
    """Tokens of a row on several ranks, where a micro-batch is no more than one."""
    mesh = spec.parallelism.mesh(spec.launch.world)
    longest = longest_unit_tokens(spec, architecture(spec.model)[0])
    if spec.algorithm.micro_batch_budget < 2 * longest and mesh.cp == 1:
        for ranks in _divisors(mesh.dp_size):
            cost = "the same update; ranks split the tokens of each sequence and exchange keys and values"
            yield from _with_mesh(spec, {"cp": ranks}, cost)


def recomputing(spec: JobSpec) -> Iterator[Change]:
    """Fewer activations, which are computed again."""
    key, now = "model.gradient_checkpointing", spec.model.gradient_checkpointing
    if not now:
        yield from _setting(spec, key, "selective", "the same update, with a sixth more computation")
    if now is not True:
        yield from _setting(spec, key, True, "the same update, with a third more computation")


def offloading(spec: JobSpec) -> Iterator[Change]:
    """What goes into layers on the host."""
    if spec.model.gradient_checkpointing and not spec.model.activation_offloading:
        cost = "the same update; layers' inputs are copied to the host and back"
        yield from _setting(spec, "model.activation_offloading", True, cost)


def suggest_low_bit_optimizers(spec: JobSpec) -> Iterator[Change]:
    """Fewer bytes of optimizer state, and then of weights and gradients, for each trained number."""
    if not spec.adapter.trains_base or spec.optimizer.low_bit is None:
        return
    kind = default_registry().classes("optimizer")[spec.optimizer.low_bit]
    kept = {name: value for name, value in spec.optimizer.model_dump().items() if name in kind.model_fields}
    for rounding in (False, True):
        section: Any = kind.model_validate(kept | {"name": spec.optimizer.low_bit, "stochastic_rounding": rounding})
        changed = spec.model_copy(update={"optimizer": section})
        words = "optimizer=adamw8bit" + " optimizer.stochastic_rounding=true" * rounding
        cost = "a different update: bfloat16 weights with stochastic rounding" if rounding else "nearly the same update"
        if section != spec.optimizer and not section.problems(changed):
            yield Change(words, changed, f"{cost}; 8-bit moments by torchao")


def adapting(spec: JobSpec) -> Iterator[Change]:
    """Few trainable weights."""
    if spec.adapter.trains_base:
        changed = spec.model_copy(update={"adapter": default_registry().classes("adapter")["lora"].model_validate({})})
        yield Change("adapter=lora", changed, "a different update: low-rank, needs a larger optimizer.lr")


def quantizing(spec: JobSpec) -> Iterator[Change]:
    """A frozen base in 4 bits."""
    if spec.model.quantization is None:
        cost = "a different base: its linear layers are rounded to 4 bits"
        yield from _setting(spec, "model.quantization", "nf4", cost)


# from cheap to expensive
STEPS: tuple[Step, ...] = (
    smaller_chunks,
    fewer_answers,
    sleeping_engines,
    engine_memory_share,
    smaller_micro_batches,
    sharding,
    spreading_experts,
    sharing_rows,
    recomputing,
    offloading,
    suggest_low_bit_optimizers,
    adapting,
    quantizing,
)


def _with_option(spec: JobSpec, key: str, value: float | bool | str | None) -> JobSpec:
    group, _, name = key.partition(".")
    return spec.model_copy(update={group: getattr(spec, group).model_copy(update={name: value})})


def _setting(spec: JobSpec, key: str, value: bool | int | str, cost: str) -> Iterator[Change]:
    """The job with this option, if that is one that can be."""
    changed = _with_option(spec, key, value)
    if not getattr(changed, key.partition(".")[0]).problems(changed):
        yield Change(f"{key}={str(value).lower()}", changed, cost)


def _halving(spec: JobSpec, key: str, least: int, cost: str) -> Iterator[Change]:
    group, _, name = key.partition(".")
    value = getattr(getattr(spec, group), name, 0)
    while value // 2 >= least:
        value //= 2
        yield Change(f"{key}={value}", _with_option(spec, key, value), cost)


def _with_mesh(spec: JobSpec, sizes: Mapping[str, int], cost: str, preset: str | None = None) -> Iterator[Change]:
    """The job with these sizes of its mesh, of a preset or of its own, if that is one that can be."""
    if not sizes and preset is None:
        return
    section: Any = spec.parallelism.model_copy(update=dict(sizes))
    if preset is not None:
        section = default_registry().classes("parallelism")[preset].model_validate(dict(sizes))
    words = [f"parallelism={preset}"] if preset else []
    words += [f"parallelism.{name}={size}" for name, size in sizes.items()]
    changed = spec.model_copy(update={"parallelism": section})
    try:
        wrong = section.problems(changed) + spec.model.problems(changed)
    except SpecError:
        return
    if not wrong:
        yield Change(" ".join(words), changed, cost)


def _divisors(number: int) -> list[int]:
    return [n for n in range(2, number + 1) if number % n == 0]


@dataclass(frozen=True, slots=True)
class Advice:
    """Changes that make a job fit, or, where `fits` is false, that do not suffice either."""

    changes: Sequence[Change]
    band: MemoryBand
    fits: bool


def advise(spec: JobSpec, card: Card) -> Advice:
    """The cheapest change with which the job fits the card; else all that lower the upper end of the band."""
    offers = [step for step in STEPS if next(step(spec), None) is not None]
    for step in offers:
        tried = _until_it_fits(spec, step, card)
        if tried.fits:
            return tried
    changes: list[Change] = []
    band = estimate(spec, card).fullest_band(card)
    for step in offers:
        now = _until_it_fits(changes[-1].spec if changes else spec, step, card)
        if now.changes and now.band.high < band.high:
            changes, band = [*changes, *now.changes], now.band
        if now.fits:
            return Advice(changes, band, True)
    return Advice(changes, band, False)


def _until_it_fits(spec: JobSpec, step: Step, card: Card) -> Advice:
    """One kind of change, as far as it has to go: only its last, largest form is what is to be typed."""
    found = Advice([], MemoryBand(0, 0), False)
    for change in step(spec):
        try:
            plan = estimate(change.spec, card)
        except SpecError:  # not of this model
            continue
        found = Advice([change], plan.fullest_band(card), plan.fits(card))
        if found.fits:
            break
    return found
