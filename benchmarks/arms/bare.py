"""A bare PyTorch loop, padded or flat: what a careful person writes by hand for one model and one data set.

    python -m arms.bare padded|flat WORKLOAD RESULT STEPS BATCH LR

    padded   [N, L] with an attention mask
    flat     [1, T], rows end to end under one block mask: no token is computed that is not learnt from

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

from arms import stamps, workload
from arms.workload import Rows

IGNORED = -100
BETAS, EPS, CLIP_NORM = (0.9, 0.95), 1e-8, 1.0
Forward = Callable[[Any, Rows], tuple[Tensor, Tensor]]


def adamw(model: torch.nn.Module, lr: float) -> torch.optim.Optimizer:
    """The optimizer of the bare arms; the other arms are given the same numbers."""
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=BETAS, eps=EPS, weight_decay=0.0, fused=True)


def _labels(ids: list[int], mask: list[int]) -> list[int]:
    """Each position's target: the next token if it is learnt."""
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


def flat(model: Any, rows: Rows) -> tuple[Tensor, Tensor]:
    """logits [T, V] and labels [T]."""
    lengths = torch.tensor([len(row) for row in rows.ids])
    owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    index = torch.arange(len(owner))
    block = (owner[:, None] == owner) & (index[:, None] >= index)
    positions = index - (torch.cumsum(lengths, 0) - lengths)[owner]
    ids = torch.tensor([t for row in rows.ids for t in row])
    pairs = zip(rows.ids, rows.mask, strict=True)
    target = torch.tensor([t for row, mask in pairs for t in _labels(row, mask)])
    logits = model(
        input_ids=ids[None], position_ids=positions[None], attention_mask=block[None, None], use_cache=False
    ).logits
    return logits[0], target


FORWARDS: dict[str, Forward] = {"padded": padded, "flat": flat}


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
