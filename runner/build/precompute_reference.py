"""Log-probabilities of a run's reference, computed before the first step and kept between runs.

    steps' items, held-out items ──algorithm──▶ batches the reference scores ──unknown ones──▶ kept on disk

The model that scores is the policy before it learns, a new adapter off, one that it came with on: a run that continues
loads its checkpoint only after this.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from runner import __version__
from runner.core.auto_choices import Decisions
from runner.core.batch import Batch
from runner.distributed.work_partition import run_on_rank0
from runner.interfaces import Data, Device, Experience, GenerativeModel, Model
from runner.parallelism.parallel_context import ParallelContext
from runner.spec.job import JobSpec
from runner.tracker.text import count_noun
from runner.trainer.evaluator import even_batches
from runner.trainer.reference_model import LogprobCache, PrecomputedReference

FORMAT = 2  # raise it when keys or files are made in another way, so that no old file is used
SAY_EVERY_S = 10.0
# of a transformers config: where it was read from and what wrote it
IGNORED_CONFIG_KEYS = ("_name_or_path", "transformers_version", "architectures", "use_cache")
# of a device's description: what changes only rounding
IGNORED_DEVICE_KEYS = {"threads"}
# of a model: what changes log-probabilities beside its weights and their types
NUMERICS_OPTIONS = {"quantization", "head_dtype", "kernels"}
WRITE_EVERY_S = 60.0  # what a process that is killed has computed in vain, at most


class SupportsPrecompute(Protocol):
    """An algorithm whose experiences follow from the data alone, and that names what is scored."""

    def collect(self, step: int) -> Experience: ...

    def experience(self, items: Sequence[Any]) -> Experience: ...

    def reference_batches(self, experience: Experience) -> Iterable[Batch]: ...


def build_cached_reference(
    spec: JobSpec, policy: GenerativeModel, world: ParallelContext, decide: Decisions, cache: Path
) -> PrecomputedReference:
    """The reference over the kept log-probabilities of this model, in a folder below `cache`."""

    def identify_weights() -> tuple[dict[str, str], str]:
        origin = policy.weights_source.identity(weights=True)
        return origin, _cache_key(spec, policy, origin, world.device)

    origin, key = run_on_rank0(world.world_peers, identify_weights)  # who has read the weights
    report_damage = partial(decide.record_fact, "algorithm.reference", "computed again")
    kept = LogprobCache(cache / "reference" / key, report_damage)
    return PrecomputedReference(
        policy,
        kept,
        origin,
        world.world_peers,
        budget=spec.algorithm.micro_batch_budget,
        device=world.device.torch_device,
        during=policy.adapter_disabled if policy.weights_source.adapter is None else nullcontext,
        peers=world.peers,
        stage=policy.stage,
    )


def _cache_key(spec: JobSpec, policy: GenerativeModel, origin: Mapping[str, str], device: Device) -> str:
    """sha256 of what the log-probabilities depend on, beside the tokens that they are kept by."""
    architecture = policy.inner.config.to_dict()
    options = spec.model.model_dump(mode="json", include=NUMERICS_OPTIONS, exclude_none=True)
    whole = {
        "format": FORMAT,
        "versions": {"runner": __version__, **{name: version(name) for name in ("torch", "transformers")}},
        "weights": origin,
        "architecture": {k: v for k, v in architecture.items() if k not in IGNORED_CONFIG_KEYS},
        "attention": (policy.layout, policy.default_attention),
        "types": (spec.model.compute_dtype, spec.stored_dtype()),
        "device": {k: v for k, v in device.describe().items() if k not in IGNORED_DEVICE_KEYS},
        "kernels": spec.device.numerics_options,
        **({"model_options": options} if options else {}),
    }
    return hashlib.sha256(json.dumps(whole, sort_keys=True, default=str).encode()).hexdigest()[:32]


def precompute_references(
    spec: JobSpec, models: Iterable[Model], algorithm: Any, data: Data, decide: Decisions, say: Callable[[str], None]
) -> None:
    """Compute the log-probabilities that the run's steps and evaluations need, with each cached model.

    algorithm: a `SupportsPrecompute`, where there is such a model.
    """
    for model in models:
        if isinstance(model, PrecomputedReference):
            _precompute(spec, model, algorithm, data, decide, say)


def _precompute(
    spec: JobSpec,
    model: PrecomputedReference,
    algorithm: SupportsPrecompute,
    data: Data,
    decide: Decisions,
    say: Callable[[str], None],
) -> None:
    begin = time.monotonic()
    say_at, write_at = begin + SAY_EVERY_S, begin + WRITE_EVERY_S
    scored = 0
    try:
        for number, experience in enumerate(_experiences(spec, algorithm, data)):
            for batch in algorithm.reference_batches(experience):
                scored += model.precompute(batch)
            now = time.monotonic()
            if now >= say_at:
                say_at = now + SAY_EVERY_S
                seen = min(number + 1, spec.steps)
                of = f"{seen} of {count_noun(spec.steps, 'step')}"
                say(f"reference log-probabilities: {count_noun(scored, 'item')} computed; {of} checked")
            if now >= write_at:
                write_at = now + WRITE_EVERY_S
                model.cache.write()
    finally:  # whatever interrupts it, the next start continues from here
        model.cache.write()
    took = f"{count_noun(scored, 'item')} computed in {time.monotonic() - begin:.1f} s"
    took = took if scored else "all items were in the cache"
    decide.record_fact("algorithm.reference", "cached", f"{took}; {model.cache.folder}")


def _experiences(spec: JobSpec, algorithm: SupportsPrecompute, data: Data) -> Iterator[Experience]:
    """What the run will learn from, and what it will be evaluated on."""
    yield from map(algorithm.collect, range(spec.steps))
    if spec.evaluation.every and (items := data.held_out_items()):
        yield from map(algorithm.experience, even_batches(items, spec.algorithm.batch_size))
