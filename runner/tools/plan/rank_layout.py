"""What one rank holds of the job's model: parameters by layer, pipeline stage, shard and expert.

    architecture ──meta device──▶ model with its adapter ──by layer──▶ Weights
    Weights ──stage──▶ its layers, and what lies at its end of the model ──shards──▶ bytes of one rank

Stages take layers as the pipeline does: as many runs as there are stages times chunks, the first ones one layer longer;
run i lies on stage i mod pp.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from math import ceil
from operator import add
from typing import Any

from torch import Tensor, nn

from runner.core.errors import Problem, SpecError
from runner.model.flops import MatmulWeights, ModelFlops, attention_widths, is_expert, matmul_weights, vision_weights
from runner.parallelism.config import ParallelismConfig
from runner.parallelism.expert_parallel import refuse_adapters
from runner.parallelism.fsdp import accumulates_unsharded
from runner.parallelism.mesh import Mesh, model_sizes
from runner.parallelism.pipeline_parallel import num_warmup_forwards, split_layers
from runner.spec.base import Head
from runner.spec.job import JobSpec
from runner.tools.plan.model import build_meta_model, decoder_layers, layer_period, sample_depths, with_depth


@dataclass(frozen=True, slots=True)
class MemoryTerm:
    """A part of a phase's memory, in bytes. pooled: one allocation of an engine, without fragmentation."""

    name: str
    bytes: int
    pooled: bool = False


@dataclass(frozen=True, slots=True)
class StepPhase:
    """What is held at once in one phase of a step."""

    name: str
    terms: Sequence[MemoryTerm]

    @property
    def bytes(self) -> int:
        """All of it."""
        return sum(term.bytes for term in self.terms)

    @property
    def pooled_bytes(self) -> int:
        """What of it engines take as one piece."""
        return sum(term.bytes for term in self.terms if term.pooled)


GATHERED_AT_ONCE = 2  # layers that sharding has gathered: the one that computes, and the next


@dataclass(frozen=True, slots=True)
class StageLayout:
    """The layers of one pipeline rank. runs: (first layer, end) of each run of layers."""

    number: int
    runs: Sequence[tuple[int, int]]
    first: bool  # whether it has the embedding
    last: bool  # whether it has the last norm and the head

    @property
    def layers(self) -> list[int]:
        """Numbers of its layers."""
        return [layer for run in self.runs for layer in range(*run)]

    def runs_in_flight(self, stages: int, micro_batches: int) -> int:
        """For how many micro-batches it keeps a run's activations at once: 1F1B's, or those of the interleaved
        schedule (Narayanan et al., 2104.04473, section 2.2)."""
        return min(micro_batches * len(self.runs), num_warmup_forwards(self.number, stages, len(self.runs)))


@dataclass(frozen=True, slots=True)
class StageParts:
    """What a stage has of a model: what is in no layer, each layer without its experts, and these."""

    ends: ParameterCount
    layers: Sequence[ParameterCount]
    of_experts: Sequence[ParameterCount]

    @property
    def plain(self) -> ParameterCount:
        """All but experts."""
        return sum(self.layers, self.ends)

    @property
    def experts(self) -> ParameterCount:
        """Those of all layers."""
        return sum(self.of_experts, ParameterCount())


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The layout of a job on its ranks.

    pieces: number of FSDP shards of weights, gradients and optimizer state; experts: the same of experts;
    offloaded: whether shards are in host memory; resharded: whether layers are freed after use; memory: of a device,
    0 = unknown.
    """

    mesh: Mesh
    pieces: int
    experts: int
    chunks: int
    ring: bool
    offloaded: bool
    resharded: bool
    memory: int

    @property
    def is_sharded(self) -> bool:
        """Whether layers are gathered before they run."""
        return self.pieces > 1

    def stages(self, layers: int) -> list[StageLayout]:
        """What each stage has of so many layers."""
        count = self.mesh.pp * self.chunks
        parts = [(run.start, run.stop) for run in split_layers(layers, count)]
        pp = self.mesh.pp
        return [StageLayout(at, parts[at::pp], at == 0, at == pp - 1) for at in range(pp)]

    def bubble(self, micro_batches: int) -> float:
        """The share of a step's time for which a stage waits for others (2104.04473, section 2.2)."""
        waiting = self.mesh.pp - 1
        return waiting / (micro_batches * self.chunks + waiting)

    def stage_parts(self, weights: ModelWeights, stage: StageLayout) -> StageParts:
        """What a stage has of a model, on all its ranks together."""
        ends = (weights.first if stage.first else ParameterCount()) + (weights.last if stage.last else ParameterCount())
        if stage.last and not stage.first:
            ends += weights.tied
        layers = [weights.layers[at] for at in stage.layers]
        return StageParts(ends, layers, [weights.experts[at] for at in stage.layers])

    def rank_share(self, weights: ModelWeights, stage: StageLayout) -> ParameterCount:
        """What a rank of the stage holds of a model."""
        part = self.stage_parts(weights, stage)
        return part.plain / self.pieces + part.experts / self.experts

    def accumulated_bytes(self, weights: ModelWeights, stage: StageLayout) -> int:
        """Unsharded gradients that wait for the last micro-batch; 0 where each sums its own."""
        part = self.stage_parts(weights, stage)
        size = 4 * (part.plain.trained + part.experts.trained // self.mesh.ep)
        memory = self.memory if self.is_sharded and not self.offloaded else 0
        return size if accumulates_unsharded(size, memory) else 0

    def gathered_part(self, weights: ModelWeights, stage: StageLayout) -> ParameterCount:
        """What FSDP gathers of a stage at a time: parameters outside layers, and some or all layers."""
        if not self.is_sharded:
            return ParameterCount()
        part = self.stage_parts(weights, stage)
        layers = [plain + experts / self.mesh.ep for plain, experts in zip(part.layers, part.of_experts, strict=True)]
        if not self.resharded:
            return sum(layers, part.ends)
        return part.ends + max(layers, key=lambda one: one.bytes, default=ParameterCount()) * GATHERED_AT_ONCE


def rank_layout(config: ParallelismConfig, world: int, architecture: Any, memory: int = 0) -> RankLayout:
    """The layout of a job with this section over `world` ranks, on devices of so much memory.

    Raises SpecError for sizes that do not fit the model, and for DeepSpeed.
    """
    if config.deepspeed:
        text = f"run plan does not support {config.name}; type parallelism=fsdp or parallelism=ddp"
        raise SpecError([Problem("parallelism", text)])
    mesh = config.mesh(world)
    if found := config.divisibility_problems(mesh, model_sizes(architecture)):
        raise SpecError(found)
    heads = architecture.get_text_config().num_attention_heads // mesh.tp
    style, pieces = config.context_style, mesh.dp_shard_cp_size if config.shards else 1
    return RankLayout(
        mesh=mesh,
        pieces=pieces,
        experts=max(pieces, mesh.ep),
        chunks=config.stage_chunks,
        ring=style == "ring" or (style is None and heads % mesh.cp > 0),
        offloaded=config.offloads,
        resharded=config.reshards,
        memory=memory,
    )


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """Some of a model's parameters: numbers that learn and that do not, and their bytes."""

    trained: int = 0
    frozen: int = 0
    trained_bytes: int = 0
    frozen_bytes: int = 0

    @property
    def bytes(self) -> int:
        """All its bytes."""
        return self.trained_bytes + self.frozen_bytes

    def gathered_bytes(self, size: int) -> int:
        """Bytes of all its numbers where they are gathered to compute with, in a type of so many bytes."""
        return (self.trained + self.frozen) * size

    def __add__(self, other: ParameterCount) -> ParameterCount:
        return ParameterCount(*map(add, astuple(self), astuple(other)))

    def __sub__(self, other: ParameterCount) -> ParameterCount:
        return self + other * -1

    def __mul__(self, times: int) -> ParameterCount:
        return ParameterCount(*(number * times for number in astuple(self)))

    def __truediv__(self, parts: int) -> ParameterCount:
        """The largest of so many parts."""
        return ParameterCount(*(ceil(number / parts) for number in astuple(self)))


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """A model's parameters by place.

    Of each decoder layer, without its experts, and those; `first`: the embedding; `last`: all else; `tied`: what
    the head shares with the embedding, and must have where that is not; `flops`: what its operations follow from.
    """

    layers: tuple[ParameterCount, ...]
    experts: tuple[ParameterCount, ...]
    first: ParameterCount
    last: ParameterCount
    tied: ParameterCount
    flops: ModelFlops

    @property
    def all(self) -> ParameterCount:
        """All of them, once."""
        return sum((*self.layers, *self.experts), self.first + self.last)

    @property
    def total(self) -> int:
        """All its numbers."""
        return self.all.trained + self.all.frozen


def model_weights(spec: JobSpec, head: Head, architecture: Any, trains: bool = True) -> ModelWeights:
    """Parameters of a model of the job; without `trains`, of a frozen copy. Repeated layers count once."""
    depth = architecture.get_text_config().num_hidden_layers
    low, high = sample_depths(depth, layer_period(architecture, False))
    model = build_meta_model(spec, head, with_depth(architecture, min(depth, high)), adapted=trains)
    if trains and spec.parallelism.mesh(spec.launch.world).ep > 1:
        refuse_adapters(model.module)
    plain, experts = ([_layer_count(layer, trains, one) for layer in decoder_layers(model)] for one in (False, True))
    embedding, output = model.inner.get_input_embeddings(), model.inner.get_output_embeddings()
    first = _count_parameters(embedding.parameters(), trains)
    last = _count_parameters(model.module.parameters(), trains) - first - sum((*plain, *experts), ParameterCount())
    shared = output is not None and {id(p) for p in output.parameters()} & {id(p) for p in embedding.parameters()}
    places = [at if at < high else low + (at - low) % (high - low) for at in range(depth)]
    return ModelWeights(
        layers=tuple(plain[at] for at in places),
        experts=tuple(experts[at] for at in places),
        first=first,
        last=last,
        tied=first if shared else ParameterCount(),
        flops=ModelFlops(_matmul_weights(model, places), attention_widths(architecture), vision_weights(model.inner)),
    )


def _matmul_weights(model: Any, places: Sequence[int]) -> MatmulWeights:
    """Those of a model whose layers are, in this order, the ones at `places` of `model`."""
    counted = [matmul_weights(layer, model.inner) for layer in decoder_layers(model)]
    rest = matmul_weights(model.module, model.inner) + sum(counted, MatmulWeights()) * -1
    return sum((counted[at] for at in places), rest)


def _layer_count(layer: nn.Module, trains: bool, experts: bool) -> ParameterCount:
    return _count_parameters((p for name, p in layer.named_parameters() if is_expert(name) == experts), trains)


def _count_parameters(parameters: Iterable[Tensor], trains: bool) -> ParameterCount:
    found = ParameterCount()
    for p in parameters:
        learns = trains and p.requires_grad
        found += ParameterCount(p.numel(), 0, p.nbytes, 0) if learns else ParameterCount(0, p.numel(), 0, p.nbytes)
    return found
