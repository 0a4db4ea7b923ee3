"""Variable-length batch through a transformers model: packed or padded, with the same results.

    packed   one row [1, T], positions from the batch, attention cut at row ends
    padded   [N, L] with the padding on the right, the model's own attention

`BatchTokens` says which tokens of the batch this process computes: all, or a share of them
(`runner.model.context_parallel`).

Two kinds of rotary positions choose their frequencies by the longest row of the whole call: `dynamic` beyond
max_position_embeddings, `longrope` beyond original_max_position_embeddings. There the numbers of a row, and so the
update, would depend on what shares its micro-batch; up to there they do not. Longer rows are refused.

Legend: N rows, T tokens, W of them on this rank, S predicted tokens, L longest row, H features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from runner.core.batch import Batch
from runner.core.errors import Problem, SpecError
from runner.core.prefix_tree import paths, rows_as_paths
from runner.interfaces import VarlenAttention
from runner.model.packed_attention import AttentionPlan, pad_into_buckets, plan_attention

BatchLayout = Literal["packed", "padded"]
ForwardFn = Callable[..., Tensor]  # model keywords → [B, L, H]


def run_packed(forward: ForwardFn, batch: Batch, kernel: VarlenAttention | None = None) -> Tensor:
    """All rows as one, without padding."""
    ids, positions = input_ids(batch), batch.tokens["positions"]
    if (rope := batch.tokens.get("rope")) is not None:
        positions = rope.T
    return run_with_attention(forward, ids, positions, plan_attention(batch, kernel), **given_experts(batch))


def input_ids(batch: Batch) -> Tensor:
    """What the model reads [T]: the ids, or, in a batch with images, ids that stand for these."""
    return batch.tokens.get("inputs", batch.tokens["ids"])


def given_experts(batch: Batch, index: Tensor | None = None) -> dict[str, Tensor]:
    """The keyword with the experts that routers take, of all tokens or those at `index`, if given."""
    experts = batch.tokens.get("experts")
    if experts is None:
        return {}
    return {"experts": experts if index is None else experts.index_select(0, index)}


def run_with_attention(
    forward: ForwardFn, ids: Tensor, positions: Tensor, attention: AttentionPlan, **more: Tensor
) -> Tensor:
    """The same of some tokens, ids [W] and positions [W] or [3, W], that attend as `attention` says."""
    places = positions.unsqueeze(-2)
    return forward(input_ids=ids[None], position_ids=places, attention_mask=None, ragged=attention, **more)[0]


def run_padded(forward: ForwardFn, batch: Batch, *, is_routed: bool = False) -> Tensor:
    """One model row per batch row or path, padded on the right; a shared prompt is computed per branch.

    is_routed: `forward` also takes `counted`, int64 [T], a place of each token

    Causality alone keeps padding (the last token again) out of the tokens before it. The attention mask says that all
    is real: the models' mask functions then take their fast way, and no padding token is left without anything to
    attend to (NaN).
    """
    tree = paths(batch) or rows_as_paths(batch)
    padded = pad_into_buckets(tree, [range(len(tree.lengths))], batch.tokens["ids"].device)
    assert padded.index is not None and padded.inverse is not None
    shape = padded.buckets.tolist()
    ids, positions = (
        x.index_select(0, padded.index).view(shape) for x in (input_ids(batch), batch.tokens["positions"])
    )
    if (rope := batch.tokens.get("rope")) is not None:
        positions = rope.index_select(0, padded.index).view(*shape, 3).permute(2, 0, 1)
    if "inputs" in batch.tokens:  # or padding would be more places of an image
        real = torch.arange(shape[1]) < torch.tensor(tree.lengths)[:, None]
        ids = ids.where(real.to(ids.device), 0)
    more = given_experts(batch, padded.index) | ({"counted": padded.inverse} if is_routed else {})
    out = forward(input_ids=ids, position_ids=positions, attention_mask=torch.ones_like(ids), **more)
    return out.flatten(0, 1).index_select(0, padded.inverse)


def max_row_length(config: Any) -> tuple[int, str] | None:
    """The most tokens of a row for the model with this transformers config, and why; None = no limit."""
    text = config.get_text_config()
    limits = []
    ropes = _rope_settings(getattr(text, "rope_parameters", None) or {})
    if (positions := getattr(text, "max_position_embeddings", None)) is not None:
        most = max([positions, *(_yarn_positions(rope, positions) for rope in ropes)])
        limits.append((most, f"the model has {most} positions" + (" by YaRN" if most > positions else "")))
    for rope in ropes:
        kind = str(rope.get("rope_type"))
        reason = f"above this length, its {kind} positions depend on the longest sequence of a micro-batch"
        if "dynamic" in kind and positions is not None:
            limits.append((positions - 1, reason))  # only shorter rows undo what a longer answer has changed
        elif kind == "longrope":
            limits.append((rope["original_max_position_embeddings"], reason))
    return min(limits, default=None)


def check_row_length(longest: int, limit: tuple[int, str] | None) -> None:
    """Raise SpecError if rows of `longest` tokens are more than `limit` allows."""
    if limit is not None and longest > limit[0]:
        text = f"sequences of {longest} tokens are too long: {limit[1]}; the maximum is {limit[0]}, prompt included"
        raise SpecError([Problem("data.max_length", text)])


def _rope_settings(parameters: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The settings of each kind of layer; most models have one for all."""
    return [v for v in parameters.values() if isinstance(v, Mapping)] or [parameters]


def _yarn_positions(rope: Mapping[str, Any], positions: int) -> int:
    """The positions that YaRN (2309.00071) extends a model to; 0 for other kinds.

    Configs state either number as max_position_embeddings.
    """
    if rope.get("rope_type") != "yarn":
        return 0
    return int((rope.get("original_max_position_embeddings") or positions) * (rope.get("factor") or 1))


class BatchTokens:
    """All tokens of a batch."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.device = batch.tokens["ids"].device

    def run(self, forward: ForwardFn, kernel: VarlenAttention | None) -> Tensor:
        """What `forward` gives for this rank's tokens in the packed layout, [W, …]."""
        return run_packed(forward, self.batch, kernel)

    def predicted_positions(self) -> Tensor:
        """The places of the tokens that are no roots and are predicted here, int64 [S] on the batch's device."""
        return self.to_device(self.locally_predicted((self.batch.structure.tokens["parent"] >= 0).nonzero()[:, 0]))

    def locally_predicted(self, places: Tensor) -> Tensor:
        """Of the places of tokens that are no roots those that are predicted here."""
        return places

    def row_ends(self) -> tuple[Tensor, Tensor]:
        """The rows whose last token is here, and its place; int64 on the batch's device."""
        ends = torch.cumsum(self.batch.structure.rows["lengths"], 0) - 1
        rows = self.is_local(ends).nonzero()[:, 0]
        return self.to_device(rows), self.to_device(ends[rows])

    def is_local(self, places: Tensor) -> Tensor:
        """Whether each of the tokens at these places is on this rank."""
        return torch.ones_like(places, dtype=torch.bool)

    def values_at(self, values: Tensor, places: Tensor) -> Tensor:
        """What `values` [W, …] has of the tokens at these places, which are here."""
        return values.index_select(0, places)

    def scatter_and_sum(self, values: Tensor, at: Tensor, size: int) -> Tensor:
        """Sum over the ranks, [size, …]: `values` [S, …] at `at`, 0 elsewhere; differentiable."""
        return values.new_zeros(size, *values.shape[1:]).index_copy(0, at, values)

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        """The sum of what the ranks have found; differentiable."""
        return value

    def gather_all(self, values: Tensor) -> Tensor:
        """`values` [W, …] of all tokens, [T, …]."""
        return values

    def to_device(self, index: Tensor) -> Tensor:
        """On the batch's device."""
        return index.to(self.device, non_blocking=True)


MakeTokens = Callable[[Batch], BatchTokens]  # which tokens of a batch this rank computes
