"""A bare PyTorch loop in three layouts: what a careful person writes by hand for one model and one data set.

    python -m arms.bare padded|flat|rows WORKLOAD RESULT STEPS BATCH LR

    padded   [N, L] with an attention mask
    flat     [1, T], rows end to end under one block mask: no padding, but attention is still made for all T² pairs
    rows     [1, T], rows end to end, one attention call per row: nothing is computed in vain

Legend: N rows, T tokens in all, L longest row, V vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen2ForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from arms import stamps, workload
from arms.workload import Rows

IGNORED = -100
BETAS, EPS, CLIP_NORM = (0.9, 0.95), 1e-8, 1.0
Forward = Callable[[Any, Rows], tuple[Tensor, Tensor]]


def adamw(model: torch.nn.Module, lr: float) -> torch.optim.Optimizer:
    """The optimizer of the bare arms; the other arms are given the same numbers."""
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=BETAS, eps=EPS, weight_decay=0.0, fused=True)


def _labels(ids: list[int], mask: list[int]) -> list[int]:
    """Each position's target: the next token if it is trained on."""
    return [t if m else IGNORED for t, m in zip(ids[1:], mask[1:], strict=True)] + [IGNORED]


def padded(model: Any, rows: Rows) -> tuple[Tensor, Tensor]:
    """logits [N·L, V] and labels [N·L]."""
    width = max(map(len, rows.ids))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows.ids])
    labels = [_labels(row, mask) for row, mask in zip(rows.ids, rows.mask, strict=True)]
    target = torch.tensor([row + [IGNORED] * (width - len(row)) for row in labels])
    lengths = torch.tensor([len(row) for row in rows.ids])
    seen = (torch.arange(width) < lengths[:, None]).long()
    logits = model(input_ids=ids, attention_mask=seen, use_cache=False).logits
    return logits.flatten(0, 1), target.flatten()


def _end_to_end(rows: Rows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ids, positions, row of each token, labels; all [T]."""
    lengths = torch.tensor([len(row) for row in rows.ids])
    owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    positions = torch.arange(len(owner)) - (torch.cumsum(lengths, 0) - lengths)[owner]
    ids = torch.tensor([t for row in rows.ids for t in row])
    pairs = zip(rows.ids, rows.mask, strict=True)
    return ids, positions, owner, torch.tensor([t for row, mask in pairs for t in _labels(row, mask)])


def flat(model: Any, rows: Rows) -> tuple[Tensor, Tensor]:
    """logits [T, V] and labels [T]."""
    ids, positions, owner, target = _end_to_end(rows)
    index = torch.arange(len(ids))
    block = (owner[:, None] == owner) & (index[:, None] >= index)
    logits = model(
        input_ids=ids[None], position_ids=positions[None], attention_mask=block[None, None], use_cache=False
    ).logits
    return logits[0], target


def by_row(model: Any, rows: Rows) -> tuple[Tensor, Tensor]:
    """logits [T, V] and labels [T]."""
    ids, positions, _, target = _end_to_end(rows)
    model.config._attn_implementation = BY_ROW
    lengths = [len(row) for row in rows.ids]
    logits = model(input_ids=ids[None], position_ids=positions[None], row_lengths=lengths, use_cache=False).logits
    return logits[0], target


def _attend_by_row(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, *, row_lengths: list[int], **_: Any
) -> tuple[Tensor, None]:
    """query, key, value [1, heads, T, d] → [1, T, heads, d]."""
    cut = [torch.split(tensor, row_lengths, dim=2) for tensor in (query, key, value)]
    out = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True) for q, k, v in zip(*cut, strict=True)
    ]
    return torch.cat(out, dim=2).transpose(1, 2), None


BY_ROW = "by_row"
ALL_ATTENTION_FUNCTIONS.register(BY_ROW, _attend_by_row)
FORWARDS: dict[str, Forward] = {"padded": padded, "flat": flat, "rows": by_row}


def one_step(model: Any, optimizer: torch.optim.Optimizer, forward: Forward, rows: Rows) -> float:
    """Forward, backward, clip, step; returns the loss before the step."""
    logits, target = forward(model, rows)
    loss = F.cross_entropy(logits, target, ignore_index=IGNORED)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(loss.detach())


def main(kind: str, folder: Path, result: Path, steps: int, batch: int, lr: float) -> None:
    """Train and write the result."""
    clock = stamps.Stamps()
    clock.imported()
    clock.watch()
    rows = workload.read(folder)
    model: Any = Qwen2ForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).train()
    optimizer = adamw(model, lr)
    losses = [one_step(model, optimizer, FORWARDS[kind], rows.batch(step, batch)) for step in range(steps)]
    stamps.write(result, clock, losses)


if __name__ == "__main__":
    name, source, target_file, count, size, rate = sys.argv[1:]
    main(name, Path(source), Path(target_file), int(count), int(size), float(rate))
