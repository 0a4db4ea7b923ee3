"""What one rank holds of the job's model: parameters by layer, pipeline stage, shard and expert.

    architecture ──meta device──▶ model with its adapter ──by layer──▶ Weights
    Weights ──stage──▶ its layers, and what lies at its end of the model ──shards──▶ bytes of one rank

Stages take layers as the pipeline does: as many runs as there are stages times chunks, the first ones one layer longer;
run i lies on stage i mod pp.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from torch import Tensor, nn

from runner.core.errors import Problem, SpecError
from runner.distributed.work_partition import in_flight
from runner.model.flops import MatmulWeights, ModelFlops, attention_widths, is_expert, matmul_weights
from runner.parallelism.config import ParallelismConfig
from runner.parallelism.expert_parallel import refuse_adapters
from runner.parallelism.mesh import Mesh, sizes_of
from runner.parallelism.pipeline_parallel import runs
from runner.spec.base import Head
from runner.spec.job import JobSpec
from runner.tools.plan.model import cut, layers, made, period, samples


@dataclass(frozen=True, slots=True)
class Term:
    """A part of a phase's memory, in bytes. pooled: whether an engine takes it as one piece, of which nothing is lost
    to fragmentation."""

    name: str
    bytes: int
    pooled: bool = False


@dataclass(frozen=True, slots=True)
class Phase:
    """What is held at once in one phase of a step."""

    name: str
    terms: Sequence[Term]

    @property
    def bytes(self) -> int:
        """All of it."""
        return sum(term.bytes for term in self.terms)

    @property
    def pooled(self) -> int:
        """What of it engines take as one piece."""
        return sum(term.bytes for term in self.terms if term.pooled)


GATHERED_AT_ONCE = 2  # layers that sharding has gathered: the one that computes, and the next


@dataclass(frozen=True, slots=True)
class Stage:
    """Runs of layers that one rank of the pipeline has. runs: of each, its first layer and the one behind its last."""

    number: int
    runs: Sequence[tuple[int, int]]
    first: bool  # whether it has the embedding
    last: bool  # whether it has the last norm and the head

    @property
    def layers(self) -> list[int]:
        """Numbers of its layers."""
        return [layer for run in self.runs for layer in range(*run)]

    def in_flight(self, stages: int, micro_batches: int) -> int:
        """For how many micro-batches it keeps a run's activations at once: 1F1B's, or those of the interleaved
        schedule (Narayanan et al., 2104.04473, section 2.2)."""
        return min(micro_batches * len(self.runs), in_flight(self.number, stages, len(self.runs)))


@dataclass(frozen=True, slots=True)
class Divided:
    """What a stage has of a model: what is in no layer, each layer without its experts, and these."""

    ends: Part
    layers: Sequence[Part]
    of_experts: Sequence[Part]

    @property
    def plain(self) -> Part:
        """All but experts."""
        return sum(self.layers, self.ends)

    @property
    def experts(self) -> Part:
        """Those of all layers."""
        return sum(self.of_experts, Part())


@dataclass(frozen=True, slots=True)
class Spread:
    """How a job lies on its ranks. pieces: in how many a stage's weights, gradients and optimizer state lie; experts:
    the same of experts; offloaded: whether pieces wait on the host; resharded: whether layers are freed after use."""

    mesh: Mesh
    pieces: int
    experts: int
    chunks: int
    ring: bool
    offloaded: bool
    resharded: bool

    @property
    def sharded(self) -> bool:
        """Whether layers are gathered before they run."""
        return self.pieces > 1

    @property
    def copies(self) -> int:
        """How many ranks hold the same of a model."""
        return self.mesh.copies // self.pieces

    def stages(self, layers: int) -> list[Stage]:
        """What each stage has of so many layers."""
        count = self.mesh.pp * self.chunks
        parts = [(run.start, run.stop) for run in runs(layers, count)]
        pp = self.mesh.pp
        return [Stage(at, parts[at::pp], at == 0, at == pp - 1) for at in range(pp)]

    def bubble(self, micro_batches: int) -> float:
        """The share of a step's time for which a stage waits for others (2104.04473, section 2.2)."""
        waiting = self.mesh.pp - 1
        return waiting / (micro_batches * self.chunks + waiting)

    def part(self, weights: Weights, stage: Stage) -> Divided:
        """What a stage has of a model, on all its ranks together."""
        ends = (weights.first if stage.first else Part()) + (weights.last if stage.last else Part())
        if stage.last and not stage.first:
            ends += weights.tied
        layers = [weights.layers[at] for at in stage.layers]
        return Divided(ends, layers, [weights.experts[at] for at in stage.layers])

    def held(self, weights: Weights, stage: Stage) -> Part:
        """What a rank of the stage holds of a model."""
        part = self.part(weights, stage)
        return part.plain / self.pieces + part.experts / self.experts

    def gathered(self, weights: Weights, stage: Stage) -> Part:
        """What is whole for a while of a stage in pieces: what is in no layer, and some layers, or all of them."""
        if not self.sharded:
            return Part()
        part = self.part(weights, stage)
        layers = [plain + experts / self.mesh.ep for plain, experts in zip(part.layers, part.of_experts, strict=True)]
        if not self.resharded:
            return sum(layers, part.ends)
        return part.ends + max(layers, key=lambda one: one.bytes, default=Part()) * GATHERED_AT_ONCE


def spread_of(config: ParallelismConfig, world: int, architecture: Any) -> Spread:
    """How a job with this section lies on so many ranks. Raises SpecError for sizes that do not fit a transformers
    config, and for DeepSpeed's ways."""
    if config.deepspeed:
        text = f"a plan can be made of torch's own ways, not of {config.name}; type parallelism=fsdp, or ddp"
        raise SpecError([Problem("parallelism", text)])
    mesh = config.mesh(world)
    if found := config.uneven(mesh, sizes_of(architecture)):
        raise SpecError(found)
    heads = architecture.get_text_config().num_attention_heads // mesh.tp
    style, pieces = config.context_style, mesh.pieces if config.shards else 1
    return Spread(
        mesh=mesh,
        pieces=pieces,
        experts=max(pieces, mesh.ep),
        chunks=config.stage_chunks,
        ring=style == "ring" or (style is None and heads % mesh.cp > 0),
        offloaded=config.offloads,
        resharded=config.reshards,
    )


@dataclass(frozen=True, slots=True)
class Part:
    """Some of a model's parameters: numbers that learn and that do not, and their bytes."""

    trained: int = 0
    frozen: int = 0
    trained_bytes: int = 0
    frozen_bytes: int = 0

    @property
    def bytes(self) -> int:
        """All its bytes."""
        return self.trained_bytes + self.frozen_bytes

    def gathered(self, size: int) -> int:
        """Bytes of all its numbers where they are gathered to compute with, in a type of so many bytes."""
        return (self.trained + self.frozen) * size

    @property
    def _all(self) -> tuple[int, int, int, int]:
        return self.trained, self.frozen, self.trained_bytes, self.frozen_bytes

    def __add__(self, other: Part) -> Part:
        return Part(*(a + b for a, b in zip(self._all, other._all, strict=True)))

    def __sub__(self, other: Part) -> Part:
        return Part(*(a - b for a, b in zip(self._all, other._all, strict=True)))

    def __mul__(self, times: int) -> Part:
        return Part(*(number * times for number in self._all))

    def __truediv__(self, parts: int) -> Part:
        """The largest of so many parts."""
        return Part(*(ceil(number / parts) for number in self._all))


@dataclass(frozen=True, slots=True)
class Weights:
    """A model's parameters by where they lie: of each decoder layer, without its experts, and those; `first`: the
    embedding; `last`: all else; `tied`: what the head shares with the embedding, and has to have where that is not;
    `flops`: what its operations follow from."""

    layers: tuple[Part, ...]
    experts: tuple[Part, ...]
    first: Part
    last: Part
    tied: Part
    flops: ModelFlops

    @property
    def all(self) -> Part:
        """All of them, once."""
        return sum((*self.layers, *self.experts), self.first + self.last)

    @property
    def total(self) -> int:
        """All its numbers."""
        return self.all.trained + self.all.frozen


def weights(spec: JobSpec, head: Head, architecture: Any, trains: bool = True) -> Weights:
    """The parameters of a model of the job; without `trains`, of a frozen copy. Layers that repeat are counted once."""
    depth = architecture.get_text_config().num_hidden_layers
    low, high = samples(depth, period(architecture, False))
    model = made(spec, head, cut(architecture, min(depth, high)), adapted=trains)
    if trains and spec.parallelism.mesh(spec.launch.world).ep > 1:
        refuse_adapters(model.module)
    plain, experts = ([_part(layer, trains, one) for layer in layers(model)] for one in (False, True))
    embedding, output = model.inner.get_input_embeddings(), model.inner.get_output_embeddings()
    first = _sum(embedding.parameters(), trains)
    last = _sum(model.module.parameters(), trains) - first - sum((*plain, *experts), Part())
    shared = output is not None and {id(p) for p in output.parameters()} & {id(p) for p in embedding.parameters()}
    places = [at if at < high else low + (at - low) % (high - low) for at in range(depth)]
    return Weights(
        layers=tuple(plain[at] for at in places),
        experts=tuple(experts[at] for at in places),
        first=first,
        last=last,
        tied=first if shared else Part(),
        flops=ModelFlops(_matmul_weights(model, places), attention_widths(architecture)),
    )


def _matmul_weights(model: Any, places: Sequence[int]) -> MatmulWeights:
    """Those of a model whose layers are, in this order, the ones at `places` of `model`."""
    counted = [matmul_weights(layer, model.inner) for layer in layers(model)]
    rest = matmul_weights(model.module, model.inner) + sum(counted, MatmulWeights()) * -1
    return sum((counted[at] for at in places), rest)


def _part(layer: nn.Module, trains: bool, experts: bool) -> Part:
    return _sum((p for name, p in layer.named_parameters() if is_expert(name) == experts), trains)


def _sum(parameters: Iterable[Tensor], trains: bool) -> Part:
    found = Part()
    for p in parameters:
        learns = trains and p.requires_grad
        found += Part(p.numel(), 0, p.nbytes, 0) if learns else Part(0, p.numel(), 0, p.nbytes)
    return found
