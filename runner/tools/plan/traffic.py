"""The work of one rank in a step of maximum-length rows: tokens, arithmetic, and bytes sent.

Bytes are the textbook's: an all-reduce of n bytes over p ranks sends 2·n·(p−1)/p from each, an all-gather, a
reduce-scatter and an all-to-all n·(p−1)/p.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import ceil, lcm
from typing import Any

import torch

from runner.device.cards import Card
from runner.model.flops import attention_pairs, key_value_size, num_kv_heads
from runner.model.initial_weights import DTYPES
from runner.spec.job import JobSpec
from runner.tools.plan.measure import full_micro_batch_tokens, longest_row_tokens, longest_unit_tokens
from runner.tools.plan.rank_layout import ModelWeights, ParameterCount, RankLayout, StageLayout


@dataclass(frozen=True, slots=True)
class RankWork:
    """Work of one rank in a step.

    Tokens (of which cp ranks each have a part), floating-point operations of the update (see `model.flops`), recomputed
    ones, micro-batches, and bytes sent, by purpose. bubble: the share of the step for which a stage waits.
    """

    tokens: int
    flops: float
    recomputed_flops: float
    micro_batches: int
    sending: Mapping[str, int]
    bubble: float

    @property
    def sent_bytes(self) -> int:
        """All bytes sent."""
        return sum(self.sending.values())


def rank_work(
    spec: JobSpec,
    shape: Any,
    whole: Mapping[str, ModelWeights],
    own: Mapping[str, ModelWeights],
    spread: RankLayout,
    stage: StageLayout,
) -> RankWork:
    """The work of a rank of this stage. whole, own: by role, the models, and what slices have of them."""
    mesh = spread.mesh
    units = spec.algorithm.batch_size * spec.algorithm.samples_per_prompt
    tokens = ceil(units * longest_unit_tokens(spec, shape) / mesh.dp_size)
    cuts = ceil(tokens / full_micro_batch_tokens(spec, shape))
    sending = sent_bytes_by_purpose(spec, shape, spread, stage, own.values(), tokens, cuts)
    together = mesh.tp * mesh.cp * mesh.pp
    flops, again = (count / together for count in update_flops(spec, shape, whole.values(), tokens))
    return RankWork(tokens, flops, again, cuts, sending, spread.bubble(cuts))


def sent_bytes_by_purpose(
    spec: JobSpec,
    shape: Any,
    spread: RankLayout,
    stage: StageLayout,
    models: Collection[ModelWeights],
    tokens: int,
    cuts: int,
) -> dict[str, int]:
    """Bytes that one rank sends in a step, by purpose.

    models: those that learn; cuts: micro-batches
    """
    mesh, inner, size, layers = spread.mesh, shape.get_text_config(), compute_dtype(spec).itemsize, len(stage.layers)
    hidden = tokens * inner.hidden_size * size // mesh.cp  # bytes of the hidden states of this rank's tokens
    passes = 3 if spec.model.gradient_checkpointing else 2  # forward, backward, and forward where it is recomputed
    # All-reduces of tensor parallelism (Shoeybi et al., 1909.08053, section 3): each layer's attention and feed-forward
    # part end in one, forward and backward, and once more where recomputed.
    slices = layers * 2 * passes * 2 * hidden * (mesh.tp - 1) // mesh.tp
    # Hidden states to the next stage, and their gradients to the one before, once for each run of layers.
    stages = (2 * len(stage.runs) - stage.last - stage.first) * hidden if mesh.pp > 1 else 0
    # Each token's hidden states to its experts and back, all to all, if they are chosen evenly (GShard, 2006.16668,
    # section 3.2).
    chosen = getattr(inner, "num_experts_per_tok", 0) or 0
    experts = layers * 2 * passes * chosen * hidden * (mesh.ep - 1) // mesh.ep
    found = {
        "weights and gradients": sum(_sharding_bytes(model, spread, stage, cuts, size) for model in models),
        "slices": len(models) * slices,
        "rows": len(models) * _context_bytes(inner, spread, layers, tokens, passes, size),
        "stages": len(models) * stages,
        "experts": len(models) * experts,
    }
    return {name: sent for name, sent in found.items() if sent}


def _sharding_bytes(model: ModelWeights, spread: RankLayout, stage: StageLayout, cuts: int, size: int) -> int:
    """What layers and experts in pieces take.

    They are gathered for the forward and, if freed, again for the backward pass, in each micro-batch; all but the last
    layer and what is in no layer are freed. Gradients are summed into pieces, in each micro-batch or only in the last,
    and between copies once.
    """
    mesh, again = spread.mesh, spread.resharded
    part, r = spread.stage_parts(model, stage), mesh.dp_cp_size // spread.pieces
    plain, experts = part.plain, part.experts
    sums = 1 if spread.accumulated_bytes(model, stage) else cuts
    moved = plain + sum(part.layers[:-1], ParameterCount()) * again
    moved_experts = experts + sum(part.of_experts[:-1], ParameterCount()) * again
    further, alike = spread.experts // mesh.ep, max(1, mesh.dp_cp_size // spread.experts)
    return (
        (cuts * moved.gathered_bytes(size) + sums * plain.trained_bytes) * (spread.pieces - 1) // spread.pieces
        + 2 * (plain.trained_bytes // spread.pieces) * (r - 1) // r
        + (cuts * moved_experts.gathered_bytes(size) + sums * experts.trained_bytes)
        // mesh.ep
        * (further - 1)
        // further
        + 2 * (experts.trained_bytes // spread.experts) * (alike - 1) // alike
    )


def _context_bytes(inner: Any, spread: RankLayout, layers: int, tokens: int, passes: int, size: int) -> int:
    """Bytes of context parallelism.

    Ulysses: queries, keys, values and attention outputs, all-to-all, each way (2309.14509, section 3); ring: keys
    and values to every other rank, in the backward pass again, and their gradients in float32 (2310.01889).
    """
    cp = spread.mesh.cp
    heads, kv = local_heads(inner, spread)
    numbers = layers * (tokens // cp) * key_value_size(inner)
    if spread.ring:
        return kv * numbers * (passes * size + 4) * (cp - 1)
    return passes * (heads + kv) * numbers * size * (cp - 1) // cp


def local_heads(inner: Any, spread: RankLayout) -> tuple[int, int]:
    """The heads and key-value heads of a slice; the latter repeated until Ulysses' ranks divide them."""
    heads, kv = inner.num_attention_heads // spread.mesh.tp, num_kv_heads(inner) // spread.mesh.tp
    return heads, kv if spread.ring else lcm(kv, spread.mesh.cp)


def update_flops(spec: JobSpec, shape: Any, models: Iterable[ModelWeights], tokens: int) -> tuple[float, float]:
    """Operations of the update for `tokens` tokens in rows of maximum length; and those recomputed.

    All tokens but each row's first are predicted.
    """
    row = longest_row_tokens(spec, shape)
    products, attending = _recomputed_shares(spec)
    update = again = 0.0

    def pairs(window: int | None) -> float:
        return tokens / row * attention_pairs(row, window)

    for model in models:
        weights = model.flops.weights
        update += model.flops.update(tokens, tokens - tokens / row, pairs)
        again += products * 2 * tokens * (weights.trained + weights.frozen)
        again += attending * model.flops.attention_flops(pairs)
    return update, again


def _recomputed_shares(spec: JobSpec) -> tuple[float, float]:
    """The shares of matrix products and of attention that are computed once more."""
    way = spec.model.gradient_checkpointing
    if way == "selective":
        return 0.5, 0.0  # every second product is kept, and what attention gives
    return (1 / int(way), 1 / int(way)) if way else (0.0, 0.0)  # true is 1: every layer


def peak_flops(spec: JobSpec, card: Card | None) -> float | None:
    """Peak operations per second of a card in the job's precision; None where no figure is known."""
    return None if card is None else card.flops.get(matmul_precision(spec))


def matmul_precision(spec: JobSpec) -> str:
    """What the job's products are computed in: a data type, or tf32."""
    return spec.device.matmul_precision(str(compute_dtype(spec)).removeprefix("torch."))


def compute_dtype(spec: JobSpec) -> torch.dtype:
    """The data type of hidden states."""
    return DTYPES[spec.model.compute_dtype]
