"""What one rank of a job holds when it holds most: by terms, with the arithmetic and the traffic of a step.

    phases of a step        always there                              and in it
    update                  weights, optimizer state, frozen models   activations, logits, gradients, gathered layers
    optimizer               the same                                  all gradients, and temporaries
    sampling                the same                                  keys and values, logits, gathered weights

The terms are tensors: a lower bound of what a card's own tool shows. `Band` adds what the runtime keeps and what
fragmentation costs. Nothing here has been compared with a card yet, only with an allocator (benchmarks/plan.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch

from runner.model.build import DTYPES
from runner.parallelism.mesh import Mesh
from runner.plan.architecture import architecture, published
from runner.plan.cards import HCCL_BUFFERS, Card
from runner.plan.measure import Pass, Weights, measured, sliced, weights
from runner.spec.job import JobSpec

FRAGMENTATION = 1.3  # of the upper end: memory that an allocator has reserved and cannot use
IN_FLIGHT = 2  # layers that sharding has gathered at once: the one that computes, and the next
STATES = {"adamw": 2, "sgd": 0}  # copies of what learns that an optimizer keeps


@dataclass(frozen=True, slots=True)
class Term:
    """A part of a phase's memory, in bytes."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Phase:
    """What is held at once in one phase of a step."""

    name: str
    terms: Sequence[Term]

    @property
    def bytes(self) -> int:
        """All of it."""
        return sum(term.bytes for term in self.terms)


@dataclass(frozen=True, slots=True)
class Band:
    """Between which numbers of bytes a card's own tool will show a rank's peak."""

    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Work:
    """Of one rank and step, where every row is as long as can be: tokens, floating-point operations of the update,
    micro-batches, bytes that it sends."""

    tokens: int
    flops: float
    micro_batches: int
    sent: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """The plan of one rank; all ranks are alike. `left_out`: what is part of the job and not counted."""

    mesh: Mesh
    models: Mapping[str, Weights]  # role → what learns
    phases: Sequence[Phase]
    work: Work
    found: str  # where the model's shape is from
    left_out: Sequence[str]

    @property
    def peak(self) -> Phase:
        """The phase that takes most."""
        return max(self.phases, key=lambda phase: phase.bytes)

    def band(self, card: Card) -> Band:
        """The peak with what the runtime, the communicators and fragmentation add."""
        buffers = _communicators(self.mesh) * HCCL_BUFFERS if card.device == "npu" else 0
        tensors = self.peak.bytes
        low, high = (tensors + card.context[0], round(tensors * FRAGMENTATION) + card.context[1])
        return Band(low + buffers, high + buffers)


def _communicators(mesh: Mesh) -> int:
    """Of a rank: one for each dimension that has ranks; where several have, one of all ranks; where work is dealt out
    between slices, one of the ranks that have the same slice."""
    dimensions = sum(size > 1 for size in mesh.dims.values())
    return dimensions + (dimensions > 1) + (mesh.tp > 1 and mesh.data > 1)


def estimate(spec: JobSpec) -> Estimate:
    """Plan a job. Raises SpecError or EnvironmentProblem where its model's shape cannot be had."""
    shape, found = architecture(spec.model)
    mesh = spec.parallelism.mesh(spec.launch.world)
    roles = spec.algorithm.learners().items()
    whole = {role: weights(spec, head, shape) for role, head in roles}
    own = sliced(shape, mesh.tp) if mesh.tp > 1 else shape
    models = {role: weights(spec, head, own) for role, head in roles} if mesh.tp > 1 else whole
    passes = {role: measured(spec, head, own, mesh.dp_shard) for role, head in roles}
    frozen, left_out = _frozen(spec, own, mesh)
    held = [*_held(spec, models, mesh), *frozen]
    heaviest = max(passes, key=lambda role: sum(passes[role].values()))
    work = _work(spec, shape, whole, models, mesh)
    before = models[heaviest].trained_bytes // mesh.dp_shard if work.micro_batches > 1 else 0
    phases = [Phase("update", [*held, *_passing(passes[heaviest], models[heaviest], mesh, before)])]
    phases.append(Phase("optimizer", [*held, *_stepping(spec, models, mesh)]))
    if spec.algorithm.samples:
        first = next(iter(models))
        phases.append(Phase("sampling", [*held, *_sampling(spec, shape, mesh, whole[first], models[first])]))
    return Estimate(mesh, whole, [_shown(phase) for phase in phases], work, found, left_out)


def _shown(phase: Phase) -> Phase:
    return Phase(phase.name, [term for term in phase.terms if term.bytes])


def _held(spec: JobSpec, models: Mapping[str, Weights], mesh: Mesh) -> list[Term]:
    """What a rank holds from the first step to the last."""
    learnt = sum(one.trained_bytes for one in models.values())
    states = STATES.get(spec.optimizer.name, 2) or int(getattr(spec.optimizer, "momentum", 0) > 0)
    ahead = spec.algorithm.steps_ahead()
    copies = (ahead + 1) * next(iter(models.values())).trained_bytes if ahead else 0
    return [
        Term("weights that learn", learnt // mesh.dp_shard),
        Term("weights that do not", sum(one.frozen_bytes for one in models.values()) // mesh.dp_shard),
        Term("optimizer state", states * learnt // mesh.dp_shard),
        Term("versions for sampling ahead", copies),
    ]


def _frozen(spec: JobSpec, shape: Any, mesh: Mesh) -> tuple[list[Term], list[str]]:
    """Models that only score, and what is not counted."""
    terms, left_out = [], []
    for role, one in spec.algorithm.frozen().items():
        way = one.way or ("copy" if spec.adapter.name == "none" else "adapter")
        if one.path is not None and one.path.startswith("recipe:"):
            left_out.append(f"the {role} of {one.path}, which is not there yet")
        elif one.path is not None:
            other, _ = published(one.path, one.revision)
            dtype = DTYPES[one.dtype or spec.model.dtype]
            numbers = weights(spec, "lm", other, trains=False).total
            terms.append(Term(role, numbers * _size(dtype) // (mesh.dp_shard * mesh.tp)))
        elif way == "copy":
            terms.append(Term(role, weights(spec, "lm", shape, trains=False).frozen_bytes // mesh.dp_shard))
    if spec.reward.name == "model":
        left_out.append("the reward model")
    return terms, left_out


def _passing(taken: Pass, model: Weights, mesh: Mesh, summed: int) -> list[Term]:
    """What a forward and backward pass takes, with gradients of `summed` bytes there from the passes before."""
    gathered = model.root + IN_FLIGHT * model.layer if mesh.dp_shard > 1 else 0
    whole = model.root_trained + IN_FLIGHT * model.layer_trained if mesh.dp_shard > 1 else 0
    return [
        Term("activations", taken["activations"]),
        Term("logits", taken["logits"]),
        Term("gradients", max(summed, taken["gradients"])),
        Term("layers gathered from other ranks", gathered),
        Term("gradients on their way to other ranks", whole),
    ]


def _stepping(spec: JobSpec, models: Mapping[str, Weights], mesh: Mesh) -> list[Term]:
    """What an optimizer step takes: of the model that learns most, because each steps alone."""
    largest = max(one.trained_bytes for one in models.values()) // mesh.dp_shard
    fused = getattr(spec.optimizer, "fused", False)
    return [Term("gradients", largest), Term("temporaries of the optimizer", 0 if fused else largest)]


def _sampling(spec: JobSpec, shape: Any, mesh: Mesh, whole: Weights, own: Weights) -> list[Term]:
    """What drawing rollouts takes by the model itself, whose parts are gathered for it; every rank draws a share."""
    inner = shape.get_text_config()
    answers = ceil(spec.algorithm.batch_size * getattr(spec.algorithm, "group_size", 1) / mesh.world)
    rows = min(answers, getattr(spec.sampler, "batch_size", answers))
    size = _size(_computing(spec))
    cache = rows * longest(spec) * 2 * inner.num_hidden_layers * inner.num_key_value_heads * _head_size(inner) * size
    gathered = whole.trained_bytes + whole.frozen_bytes - (own.trained_bytes + own.frozen_bytes) // mesh.dp_shard
    return [
        Term("keys and values", cache),
        Term("logits", rows * inner.vocab_size * (size + 4)),
        Term("weights gathered from other ranks", gathered),
    ]


def longest(spec: JobSpec) -> int:
    """Tokens of the longest row, its answer included."""
    return spec.data.max_length + spec.sampler.answer_tokens()


def _computing(spec: JobSpec) -> torch.dtype:
    return DTYPES[spec.model.dtype if spec.model.autocast == "none" else spec.model.autocast]


def _size(dtype: torch.dtype) -> int:
    return torch.empty((), dtype=dtype).element_size()


def _head_size(inner: Any) -> int:
    return int(getattr(inner, "head_dim", None) or inner.hidden_size // inner.num_attention_heads)


def _work(spec: JobSpec, shape: Any, whole: Mapping[str, Weights], own: Mapping[str, Weights], mesh: Mesh) -> Work:
    rows = spec.algorithm.batch_size * getattr(spec.algorithm, "group_size", 1)
    rows *= 2 if spec.algorithm.items == "pairs" else 1
    tokens = ceil(rows * longest(spec) / mesh.data)
    cuts = ceil(tokens / spec.algorithm.micro_batch_tokens)
    sent = _sent_for_data(own, mesh, cuts) + _sent_for_slices(spec, shape, len(whole), mesh.tp, tokens)
    return Work(tokens, tokens * flops_per_token(spec, shape, whole) / mesh.tp, cuts, sent)


def _sent_for_data(models: Mapping[str, Weights], mesh: Mesh, cuts: int) -> int:
    """Bytes that a rank sends in a step by the textbook: an all-reduce of n bytes over p ranks sends 2·n·(p−1)/p, an
    all-gather or reduce-scatter n·(p−1)/p; layers are gathered for the forward and again for the backward pass."""
    learnt = sum(one.trained_bytes for one in models.values())
    everything = learnt + sum(one.frozen_bytes for one in models.values())
    r, s = mesh.dp_replicate, mesh.dp_shard
    sharding = cuts * (2 * everything + learnt) * (s - 1) // s
    return sharding + 2 * (learnt // s) * (r - 1) // r


def _sent_for_slices(spec: JobSpec, shape: Any, models: int, tp: int, tokens: int) -> int:
    """The same of tensor parallelism: each layer's attention and feed-forward part end in an all-reduce of the hidden
    states, forward and backward, and once more where they are recomputed (Shoeybi et al., 1909.08053, section 3)."""
    inner = shape.get_text_config()
    passes = 3 if spec.model.gradient_checkpointing else 2
    hidden = tokens * inner.hidden_size * _size(_computing(spec))
    return models * inner.num_hidden_layers * 2 * passes * 2 * hidden * (tp - 1) // tp


def flops_per_token(spec: JobSpec, shape: Any, models: Mapping[str, Weights]) -> float:
    """Operations of the update for one token of a row of the greatest length: 2 per weight that multiplies and pass
    (Kaplan et al., 2001.08361, section 2.1), and those of causal attention; a frozen weight has no gradient."""
    inner = shape.get_text_config()
    width = inner.num_attention_heads * _head_size(inner)
    attention = 2.0 * inner.num_hidden_layers * width * longest(spec)  # 4·width per pair, and half of the pairs
    recomputed = 1 if spec.model.gradient_checkpointing else 0
    total = 0.0
    for model in models.values():
        used = _multiplying(inner, model)
        backward = 2 if model.trained > model.frozen else 1
        total += 2 * used * (1 + backward + recomputed) + attention * (3 + recomputed)
    return total


def _multiplying(inner: Any, model: Weights) -> float:
    """Weights that a token is multiplied with: no embedding that is only looked up, and of experts those it takes."""
    looked_up = 0 if inner.tie_word_embeddings else inner.vocab_size * inner.hidden_size
    experts = getattr(inner, "num_experts", 0) or 0
    if not experts:
        return float(model.total - looked_up)
    one = 3 * inner.hidden_size * inner.moe_intermediate_size * inner.num_hidden_layers
    return float(model.total - looked_up - one * (experts - inner.num_experts_per_tok))
