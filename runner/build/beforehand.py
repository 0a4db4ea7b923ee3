"""What a run will ask of its reference, computed before the first step and kept between runs.

    steps' items, held-out items ──algorithm──▶ batches the reference scores ──unknown ones──▶ kept on disk

The model that scores is the policy before it learns, its adapter off where it has one: a run that goes on loads its
checkpoint only after this.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from runner import __version__
from runner.batch import Batch
from runner.cached import CachedModel
from runner.decisions import Decisions
from runner.held_out_loss import shares
from runner.kept import KeptLogprobs
from runner.protocols import Data, Device, Experience, Model
from runner.spec.job import JobSpec

FORMAT = 1  # raise it when keys or files are made in another way, so that no old file is used
SAY_EVERY_S = 10.0


class Foreseeable(Protocol):
    """What is needed of an algorithm: its experiences follow from the data, and it says what of them is scored."""

    def collect(self, step: int) -> Experience: ...

    def experience(self, items: Sequence[Any]) -> Experience: ...

    def referenced(self, experience: Experience) -> Iterable[Batch]: ...


def build_cached(spec: JobSpec, policy: Any, data: Data, device: Device, decide: Decisions, cache: Path) -> CachedModel:
    """The reference over the kept log-probabilities of this model and data, in a folder below `cache`."""
    origin = policy.source.identity(weights=True)
    kept = KeptLogprobs(
        cache / "reference" / _key(spec, origin, data, device),
        lambda damage: decide.state("algorithm.reference", "computed again", damage),
    )
    return CachedModel(
        policy,
        kept,
        origin,
        budget=spec.algorithm.micro_batch_tokens,
        device=device.torch_device,
        during=nullcontext if spec.adapter.name == "none" else policy.module.disable_adapter,
    )


def _key(spec: JobSpec, origin: dict[str, str], data: Data, device: Device) -> str:
    """sha256 of what the log-probabilities depend on, beside the tokens that they are kept by."""
    versions = {name: version(name) for name in ("torch", "transformers")}
    computed = {"dtype": spec.model.dtype, "autocast": spec.model.autocast, "device": device.torch_device.type}
    whole = {"format": FORMAT, "runner": __version__, **versions, **computed, "model": origin, "data": data.fingerprint}
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:32]


def compute_beforehand(
    spec: JobSpec, models: Iterable[Model], algorithm: Any, data: Data, decide: Decisions, say: Callable[[str], None]
) -> None:
    """Let each model that is asked beforehand score what the run's steps and evaluations will ask for.

    algorithm: a `Foreseeable`, where there is such a model.
    """
    for model in models:
        if isinstance(model, CachedModel):
            _compute(spec, model, algorithm, data, decide, say)


def _compute(
    spec: JobSpec, model: CachedModel, algorithm: Foreseeable, data: Data, decide: Decisions, say: Callable[[str], None]
) -> None:
    begin = last = time.monotonic()
    scored = 0
    for number, experience in enumerate(_experiences(spec, algorithm, data)):
        if time.monotonic() - last > SAY_EVERY_S:
            last = time.monotonic()
            say(f"reference {scored} items scored; {min(number, spec.steps)} of {spec.steps} steps looked through")
        scored += sum(model.learn(batch) for batch in algorithm.referenced(experience))
    model.kept.write()
    took = f"{scored} items scored in {time.monotonic() - begin:.1f} s" if scored else "all known, nothing was computed"
    decide.state("algorithm.reference", "cached", f"{took}; {model.kept.folder}")


def _experiences(spec: JobSpec, algorithm: Foreseeable, data: Data) -> Iterator[Experience]:
    """What the run will learn from, and what it will be evaluated on."""
    yield from map(algorithm.collect, range(spec.steps))
    if spec.evaluation.every and (items := data.held_out_items()):
        yield from map(algorithm.experience, shares(items, spec.algorithm.batch_size))
