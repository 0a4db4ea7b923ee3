"""How a ragged batch runs through a transformers model: packed or padded; both give the same numbers.

    packed   one row [1, T], positions from the batch, attention cut at row ends
    padded   [N, L] with the padding on the right, the model's own attention

Legend: N rows, T tokens, L longest row, H features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from runner.batch import Batch
from runner.model.attention import rows_of
from runner.tree import paths

Layout = Literal["packed", "padded"]
Forward = Callable[..., Tensor]  # model keywords → [B, L, H]


def run(layout: Layout, forward: Forward, batch: Batch) -> Tensor:
    """What `forward` gives for every token of the batch, [T, H]."""
    return packed(forward, batch) if layout == "packed" else padded(forward, batch)


def packed(forward: Forward, batch: Batch) -> Tensor:
    """All rows as one, without padding."""
    rows = rows_of(batch)
    ids, positions = batch.tokens["ids"], batch.tokens["positions"]
    return forward(input_ids=ids[None], position_ids=positions[None], attention_mask=None, ragged=rows)[0]


def padded(forward: Forward, batch: Batch) -> Tensor:
    """One model row per batch row (or path, so that a shared prompt is computed for every branch), padded on the right.

    Causality alone keeps padding out of the tokens before it. The attention mask says that all is real: the models'
    mask functions then take their fast way, and no padding token is left without anything to attend to (NaN).
    """
    tree = paths(batch)
    if tree is None:
        return _padded(forward, batch.tokens["ids"], batch.tokens["positions"], batch.rows["lengths"])
    device = batch.tokens["ids"].device
    index = tree.index.to(device)
    lengths = torch.tensor(tree.lengths, device=device)
    out = _padded(forward, batch.tokens["ids"][index], batch.tokens["positions"][index], lengths)
    return out.index_select(0, tree.inverse.to(device))


def _padded(forward: Forward, flat_ids: Tensor, flat_positions: Tensor, lengths: Tensor) -> Tensor:
    """What `forward` gives for rows of `lengths` that lie end to end."""
    column = torch.arange(int(lengths.max()), device=lengths.device)
    real = column < lengths[:, None]
    ids = torch.zeros_like(real, dtype=torch.int64).masked_scatter_(real, flat_ids)
    positions = column.repeat(len(lengths), 1).masked_scatter_(real, flat_positions)
    out = forward(input_ids=ids, position_ids=positions, attention_mask=torch.ones_like(ids))
    return out.flatten(0, 1).index_select(0, real.flatten().nonzero()[:, 0])
