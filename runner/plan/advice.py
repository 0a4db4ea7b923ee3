"""What to change so that a job fits: one change if one is enough, cheapest first, else as many as are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from runner.plan.cards import Card
from runner.plan.estimate import Band, estimate, longest
from runner.registry import default_registry
from runner.spec.job import JobSpec

LEAST_CHUNK = 256  # tokens of the LM head's chunks; with fewer, starting the products costs more than they do


@dataclass(frozen=True, slots=True)
class Change:
    """An option to be typed, the job with it, and what it costs."""

    word: str
    spec: JobSpec
    cost: str


@dataclass(frozen=True, slots=True)
class Advice:
    """Changes that make a job fit, or, where `fits` is false, that do not suffice either."""

    changes: Sequence[Change]
    band: Band
    fits: bool


def advise(spec: JobSpec, card: Card) -> Advice:
    """The cheapest change with which the upper end of the band is within the card's memory; else several."""
    offers = [step for step in _STEPS if next(step(spec), None) is not None]
    for step in offers:
        tried = _until_it_fits(spec, step, card)
        if tried.fits:
            return tried
    changes: list[Change] = []
    band = Band(0, 0)
    for step in offers:
        now = _until_it_fits(changes[-1].spec if changes else spec, step, card)
        changes, band = [*changes, *now.changes], now.band
        if now.fits:
            return Advice(changes, band, True)
    return Advice(changes, band, False)


def _until_it_fits(spec: JobSpec, step: Step, card: Card) -> Advice:
    """One kind of change, as far as it has to go: only its last, largest form is what is to be typed."""
    last, band = None, Band(0, 0)
    for last in step(spec):
        band = estimate(last.spec).band(card)
        if band.high <= card.memory:
            return Advice([last], band, True)
    return Advice([] if last is None else [last], band, False)


def _with(spec: JobSpec, key: str, value: int | bool) -> JobSpec:
    group, _, name = key.partition(".")
    return spec.model_copy(update={group: getattr(spec, group).model_copy(update={name: value})})


def _halved(spec: JobSpec, key: str, least: int, cost: str) -> Iterator[Change]:
    group, _, name = key.partition(".")
    value = getattr(getattr(spec, group), name, 0)
    while value // 2 >= least:
        value //= 2
        yield Change(f"{key}={value}", _with(spec, key, value), cost)


def _smaller_chunks(spec: JobSpec) -> Iterator[Change]:
    yield from _halved(spec, "model.head_chunk_tokens", LEAST_CHUNK, "the same update, as fast but for a few percent")


def _smaller_micro_batches(spec: JobSpec) -> Iterator[Change]:
    cost = "the same update; the device is less busy with little at once"
    yield from _halved(spec, "algorithm.micro_batch_tokens", longest(spec), cost)


def _fewer_answers(spec: JobSpec) -> Iterator[Change]:
    if spec.algorithm.samples:
        yield from _halved(spec, "sampler.batch_size", 8, "the same answers, in more turns")


def _sharding(spec: JobSpec) -> Iterator[Change]:
    kinds = default_registry().classes("parallelism")
    if "fsdp" in kinds and spec.launch.world > 1 and spec.parallelism.mesh(spec.launch.world).dp_shard == 1:
        changed = spec.model_copy(update={"parallelism": kinds["fsdp"].model_validate({})})
        yield Change("parallelism=fsdp", changed, "the same update; layers travel between the devices in every pass")


def _recomputing(spec: JobSpec) -> Iterator[Change]:
    if not spec.model.gradient_checkpointing:
        key = "model.gradient_checkpointing"
        yield Change(f"{key}=true", _with(spec, key, True), "the same update, with a third more arithmetic")


def _adapting(spec: JobSpec) -> Iterator[Change]:
    if spec.adapter.name == "none":
        changed = spec.model_copy(update={"adapter": default_registry().classes("adapter")["lora"].model_validate({})})
        yield Change("adapter=lora", changed, "another update: a low-rank one, which wants a larger optimizer.lr")


Step = Callable[[JobSpec], Iterator[Change]]
_STEPS: tuple[Step, ...] = (
    _smaller_chunks,
    _fewer_answers,
    _smaller_micro_batches,
    _sharding,
    _recomputing,
    _adapting,
)
