"""Models of the families that have fused operators, and trees of rows to run through them."""

from __future__ import annotations

from typing import Any

import torch

from runner.core.prefix_tree import Branch, Tree
from tests.model import zoo

FAMILIES = ("qwen2", "qwen3", "qwen3_moe", "llama")


def family(kind: str, **options: Any) -> Any:
    """A small model of the family, whose every parameter learns."""
    return zoo.module(kind, **options).requires_grad_(True)


def trees() -> list[Tree]:
    """Prompts with several answers, and two that share nothing."""
    stream = torch.Generator().manual_seed(3)

    def ids(count: int) -> list[int]:
        return torch.randint(0, 256, (count,), generator=stream).tolist()

    shapes = ((6, (4, 1, 9)), (1, (3,)), (12, (5, 5)), (2, (7,)))
    return [
        Tree(ids(prompt), [Branch(i := ids(n), {"weight": [1.0] * len(i)}) for n in sizes]) for prompt, sizes in shapes
    ]
