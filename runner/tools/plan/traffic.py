"""The work of one rank in a step of maximum-length rows: tokens, arithmetic, and bytes sent.

Bytes are the textbook's: an all-reduce of n bytes over p ranks sends 2·n·(p−1)/p from each, an all-gather, a
reduce-scatter and an all-to-all n·(p−1)/p.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil, lcm
from typing import Any

import torch

from runner.device.cards import Card
from runner.model.flops import attention_pairs, head_size
from runner.model.initial_weights import DTYPES
from runner.spec.job import JobSpec
from runner.tools.plan.measure import longest_row_tokens
from runner.tools.plan.rank_layout import ModelWeights, RankLayout, StageLayout


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
    rows = spec.algorithm.batch_size * spec.algorithm.samples_per_prompt
    rows *= 2 if spec.algorithm.item_kind == "pairs" else 1
    tokens = ceil(rows * longest_row_tokens(spec) / mesh.dp_size)
    cuts = ceil(tokens / spec.algorithm.micro_batch_tokens)
    traffic = Traffic(spec, shape, spread, stage, tokens, cuts, len(whole))
    together = mesh.tp * mesh.cp * mesh.pp
    flops, again = (count / together for count in update_flops(spec, whole.values(), tokens))
    return RankWork(tokens, flops, again, cuts, traffic.sending(own), spread.bubble(cuts))


@dataclass(frozen=True)
class Traffic:
    """What one rank sends in a step. models: how many learn."""

    spec: JobSpec
    shape: Any
    spread: RankLayout
    stage: StageLayout
    tokens: int
    cuts: int
    models: int

    def sending(self, own: Mapping[str, ModelWeights]) -> dict[str, int]:
        """Bytes by what they are for; without what takes none."""
        found = {
            "weights and gradients": sum(self._for_data(one) for one in own.values()),
            "slices": self.models * self._for_slices(),
            "rows": self.models * self._for_rows(),
            "stages": self.models * self._for_stages(),
            "experts": self.models * self._for_experts(),
        }
        return {name: sent for name, sent in found.items() if sent}

    @cached_property
    def _inner(self) -> Any:
        return self.shape.get_text_config()

    @property
    def _size(self) -> int:
        """Bytes of a number of the hidden states."""
        return compute_dtype(self.spec).itemsize

    @property
    def _hidden(self) -> int:
        """Bytes of the hidden states of this rank's tokens in a step."""
        return self.tokens * self._inner.hidden_size * self._size // self.spread.mesh.cp

    @property
    def _passes(self) -> int:
        """Number of passes in which layers exchange data: forward, backward, and recomputed forward."""
        return 3 if self.spec.model.gradient_checkpointing else 2

    @property
    def _layers(self) -> int:
        return len(self.stage.layers)

    def _for_data(self, model: ModelWeights) -> int:
        """Layers in pieces are gathered for the forward and, if freed, again for the backward pass, in each
        micro-batch; gradients are summed into pieces, and between copies once."""
        spread, r = self.spread, self.spread.mesh.dp_cp_size // self.spread.pieces
        part = spread.stage_parts(model, self.stage)
        plain = part.plain
        gathered = (2 if spread.resharded else 1) * plain.gathered_bytes(self._size)
        sharding = self.cuts * (gathered + plain.trained_bytes) * (spread.pieces - 1) // spread.pieces
        alike = max(1, spread.mesh.dp_cp_size // spread.experts)
        experts = part.experts.trained_bytes // spread.experts
        return (
            sharding
            + 2 * (plain.trained_bytes // spread.pieces) * (r - 1) // r
            + self._of_experts(part.experts.gathered_bytes(self._size), part.experts.trained_bytes)
            + 2 * experts * (alike - 1) // alike
        )

    def _of_experts(self, held: int, learns: int) -> int:
        """The same of experts where they lie in pieces beside being shared out."""
        further = self.spread.experts // self.spread.mesh.ep
        moved = (2 if self.spread.resharded else 1) * held + learns
        return self.cuts * moved // self.spread.mesh.ep * (further - 1) // further

    def _for_slices(self) -> int:
        """All-reduces of tensor parallelism (Shoeybi et al., 1909.08053, section 3).

        Each layer's attention and feed-forward part end in one, forward and backward, and once more where recomputed.
        """
        tp = self.spread.mesh.tp
        return self._layers * 2 * self._passes * 2 * self._hidden * (tp - 1) // tp

    def _for_rows(self) -> int:
        """Bytes of context parallelism.

        Ulysses: queries, keys, values and attention outputs, all-to-all, each way (2309.14509, section 3); ring: keys
        and values to every other rank, in the backward pass again, and their gradients in float32 (2310.01889).
        """
        mesh = self.spread.mesh
        if mesh.cp == 1:
            return 0
        heads, kv = local_heads(self._inner, self.spread)
        numbers = self.tokens // mesh.cp * head_size(self._inner)
        if self.spread.ring:
            return self._layers * 2 * kv * numbers * (self._passes * self._size + 4) * (mesh.cp - 1)
        return self._layers * self._passes * 2 * (heads + kv) * numbers * self._size * (mesh.cp - 1) // mesh.cp

    def _for_stages(self) -> int:
        """Hidden states to the next stage, and their gradients to the one before, once for each run of layers."""
        forward = len(self.stage.runs) - self.stage.last
        back = len(self.stage.runs) - self.stage.first
        return (forward + back) * self._hidden if self.spread.mesh.pp > 1 else 0

    def _for_experts(self) -> int:
        """Each token's hidden states to its experts and back, all to all, if they are chosen evenly
        (GShard, 2006.16668, section 3.2)."""
        ep = self.spread.mesh.ep
        taken = getattr(self._inner, "num_experts_per_tok", 0) or 0
        return self._layers * 2 * self._passes * taken * self._hidden * (ep - 1) // ep


def local_heads(inner: Any, spread: RankLayout) -> tuple[int, int]:
    """The heads and key-value heads of a slice; the latter repeated until Ulysses' ranks divide them."""
    heads, kv = inner.num_attention_heads // spread.mesh.tp, inner.num_key_value_heads // spread.mesh.tp
    return heads, kv if spread.ring else lcm(kv, spread.mesh.cp)


def update_flops(spec: JobSpec, models: Iterable[ModelWeights], tokens: int) -> tuple[float, float]:
    """Operations of the update for `tokens` tokens in rows of maximum length; and those recomputed.

    All tokens but each row's first are predicted.
    """
    row = longest_row_tokens(spec)
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
