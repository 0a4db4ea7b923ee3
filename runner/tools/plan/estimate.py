"""The plan of a job: peak memory of one rank by terms, with the arithmetic and traffic of a step.

    job ──shape──▶ weights, passes ──for each stage of a pipeline──▶ terms ──the one that takes most──▶ Estimate

The terms are tensors: a lower bound of what a card's own tool shows. `MemoryBand` adds what the runtime keeps and what
fragmentation costs. Nothing here has been compared with a card yet, only with an allocator (benchmarks/plan.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runner.core.device_kinds import find_kind
from runner.core.errors import Problem, SpecError
from runner.device.cards import Card
from runner.parallelism.mesh import Mesh
from runner.sampler.vllm.versions import LOST, REMEDY
from runner.spec.job import JobSpec
from runner.tools.plan.measure import Passes, unsupported_model
from runner.tools.plan.memory_breakdown import MemoryBreakdown, frozen_model_terms
from runner.tools.plan.model import architecture, expert_parallel_config, tensor_parallel_config
from runner.tools.plan.rank_layout import MemoryTerm, ModelWeights, StageLayout, StepPhase, model_weights, rank_layout
from runner.tools.plan.rollout_memory import (
    EngineMemory,
    SamplerDevices,
    engine_memory,
    engine_sleep_level,
    min_sampling_seconds,
    sampler_devices,
    shared_memory_terms,
)
from runner.tools.plan.traffic import RankWork, rank_work

FRAGMENTATION = 1.3  # of the upper end: memory that an allocator has reserved and cannot use


@dataclass(frozen=True, slots=True)
class MemoryBand:
    """Between which numbers of bytes a card's own tool will show a rank's peak."""

    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """The plan of one rank; of pipeline stages, the one with the most memory.

    shape: the transformers config; models: role → all its weights; host: what the rank keeps in its host's memory;
    shelf: what is in /dev/shm of rank 0's machine; engine: the one that samples; samplers: the devices that only
    sample; sampling_s: seconds that sampling takes at least; found: where the model's shape is from; left_out: what is
    part of the job and not counted
    """

    mesh: Mesh
    stage: StageLayout
    shape: Any
    models: Mapping[str, ModelWeights]
    phases: Sequence[StepPhase]
    host: Sequence[MemoryTerm]
    shelf: Sequence[MemoryTerm]
    engine: EngineMemory | None
    samplers: SamplerDevices | None
    sampling_s: float | None
    work: RankWork
    found: str
    left_out: Sequence[str]

    @property
    def peak(self) -> StepPhase:
        """The phase that takes most."""
        return max(self.phases, key=lambda phase: phase.bytes)

    def band(self, card: Card) -> MemoryBand:
        """The peak with what the runtime, the communicators and fragmentation add."""
        buffers = _communicators(self.mesh) * find_kind(card.device).communicator_bytes
        bands = [_band(phase.bytes, phase.pooled_bytes, card) for phase in self.phases]
        return MemoryBand(max(band.low for band in bands) + buffers, max(band.high for band in bands) + buffers)

    def sampler_band(self, card: Card) -> MemoryBand | None:
        """The same of a device that only samples; an engine keeps its share of the card, runtime included."""
        if self.samplers is None:
            return None
        return _band(self.samplers.bytes, 0, card) if self.engine is None else MemoryBand(*[self.samplers.bytes] * 2)

    def fullest_band(self, card: Card) -> MemoryBand:
        """The band of the device that holds most, of those that train and those that only sample."""
        return max((self.band(card), self.sampler_band(card) or MemoryBand(0, 0)), key=lambda band: band.high)

    def fits(self, card: Card) -> bool:
        """Whether the upper estimates are within the card's memory, and an engine has room for an answer."""
        return self.fullest_band(card).high <= card.memory and (self.engine is None or self.engine.rows > 0)


def _band(tensors: int, pooled: int, card: Card) -> MemoryBand:
    low, high = card.context
    return MemoryBand(tensors + low, round((tensors - pooled) * FRAGMENTATION) + pooled + high)


def _communicators(mesh: Mesh) -> int:
    """Of a rank: one for each set of ranks that it communicates with, except for shards of experts."""
    sets = [families for name, families in mesh.groups().items() if name != "expert_pieces"]
    return len({tuple(families) for families in (mesh.rank_groups(*mesh.dims), *sets) if len(families[0]) > 1})


def _refuse_lost_experts(spec: JobSpec, whole: Mapping[str, ModelWeights]) -> None:
    """Raise SpecError for an engine that its job would not start."""
    has_experts = any(part.bytes for part in next(iter(whole.values())).experts)
    if not spec.device.kind.engine_keeps_experts and has_experts and engine_sleep_level(spec):
        raise SpecError([Problem("sampler.sleep", f"{LOST}; {REMEDY}")])


def estimate(spec: JobSpec, card: Card | None = None) -> Estimate:
    """Plan a job; an engine takes a share of the card.

    Raises SpecError for a job that no plan can be made of, EnvironmentProblem where its model's shape is unknown.
    """
    shape, found = architecture(spec.model)
    if not getattr(shape.get_text_config(), "num_attention_heads", None):
        raise unsupported_model(shape, "it has no attention heads")
    spread = rank_layout(spec.parallelism, spec.launch.world, shape, card.memory if card else 0)
    mesh = spread.mesh
    heads = spec.algorithm.trained_models()
    of_slice = tensor_parallel_config(shape, mesh.tp) if mesh.tp > 1 else shape
    whole = {role: model_weights(spec, head, shape) for role, head in heads.items()}
    own = {role: model_weights(spec, head, of_slice) for role, head in heads.items()} if mesh.tp > 1 else whole
    passes = {
        role: Passes(spec, head, expert_parallel_config(of_slice, mesh.ep), spread) for role, head in heads.items()
    }
    _refuse_lost_experts(spec, whole)
    engine = engine_memory(spec, shape, whole, card)
    beside = None if spec.launch.samplers else engine
    samplers = sampler_devices(spec, shape, whole, engine)
    least = min_sampling_seconds(spec, shape, whole, card) if spec.algorithm.needs_sampler else None
    shelf = shared_memory_terms(spec, whole, spread)
    plans = []
    for stage in spread.stages(shape.get_text_config().num_hidden_layers):
        frozen, left_out = frozen_model_terms(spec, of_slice, spread, stage.number)
        work = rank_work(spec, shape, whole, own, spread, stage)
        terms = MemoryBreakdown(spec, shape, spread, stage, whole, own, passes, frozen, work.micro_batches, beside)
        held = (terms.phases(), terms.host(), shelf)
        plans.append(Estimate(mesh, stage, shape, whole, *held, engine, samplers, least, work, found, left_out))
    return max(plans, key=lambda plan: plan.peak.bytes)
