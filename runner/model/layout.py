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
from runner.model.attention import Attends, grouped, rows_of
from runner.protocols import VarlenAttention
from runner.tree import paths, rows_alone

Layout = Literal["packed", "padded"]
Forward = Callable[..., Tensor]  # model keywords → [B, L, H]


def packed(forward: Forward, batch: Batch, kernel: VarlenAttention | None = None) -> Tensor:
    """All rows as one, without padding."""
    return called(forward, batch.tokens["ids"], batch.tokens["positions"], rows_of(batch, kernel))


def called(forward: Forward, ids: Tensor, positions: Tensor, attention: Attends) -> Tensor:
    """The same of some tokens, ids and positions [W], that attend as `attention` says."""
    return forward(input_ids=ids[None], position_ids=positions[None], attention_mask=None, ragged=attention)[0]


def padded(forward: Forward, batch: Batch) -> Tensor:
    """One model row per batch row (or path, so that a shared prompt is computed for every branch), padded on the right.

    Causality alone keeps padding (the last token again) out of the tokens before it. The attention mask says that all
    is real: the models' mask functions then take their fast way, and no padding token is left without anything to
    attend to (NaN).
    """
    tree = paths(batch) or rows_alone(batch)
    rows = grouped(tree, [range(len(tree.lengths))], batch.tokens["ids"].device)
    [block], shape = rows.buckets, (rows.buckets[0].rows, rows.buckets[0].width)
    ids, positions = (batch.tokens[name].index_select(0, block.index).view(shape) for name in ("ids", "positions"))
    out = forward(input_ids=ids, position_ids=positions, attention_mask=torch.ones_like(ids))
    assert rows.inverse is not None
    return out.flatten(0, 1).index_select(0, rows.inverse)
