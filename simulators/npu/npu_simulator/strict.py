"""What the fused operators of the card refuse, as their documentation says it; here it is an error with a reason.

Where the documentation says that a result would be imprecise or wrong, the simulated card refuses, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
LARGEST_HEAD = 768
MOST_SEQUENCES = 1024  # of one call end to end
COMPRESSED = 2048  # rows and columns of the mask of sparse modes 2, 3 and 4


class Refused(RuntimeError):
    """What the operator of a real card would not take, or would compute wrongly."""


def need(good: bool, operator: str, what: str) -> None:
    """Raise Refused, with the operator's name, unless `good`."""
    if not good:
        raise Refused(f"{operator}: {what}")


def need_floats(operator: str, **tensors: Tensor) -> None:
    """All of one type, which is float16, bfloat16 or float32."""
    found = {name: tensor.dtype for name, tensor in tensors.items()}
    text = ", ".join(f"{name} {dtype}" for name, dtype in found.items())
    need(set(found.values()) <= set(FLOATS), operator, f"float16, bfloat16 and float32 are supported, not {text}")
    need(len(set(found.values())) == 1, operator, f"all inputs have one data type, not {text}")


def need_compressed(operator: str, mode: int, mask: Tensor) -> None:
    """Sparse modes 2, 3 and 4 read a causal mask of a fixed size, whatever the lengths; True hides."""
    size = (COMPRESSED, COMPRESSED)
    need(tuple(mask.shape) == size, operator, f"sparse_mode={mode} takes a mask of {size}, not {tuple(mask.shape)}")
    # its two diagonals and two of its rows: the whole of it in every call would cost more than the attention
    hides, seen = (mask.diagonal(1), mask[0, 1:]), (mask.diagonal(), mask[-1])
    right = all(bool(part.all()) for part in hides) and not any(bool(part.any()) for part in seen)
    need(right, operator, f"sparse_mode={mode} takes the mask that is True above the diagonal and nowhere else")


def need_mask(operator: str, mode: int, mask: Tensor | None) -> None:
    """A sparse mode without a mask hides nothing on the card, which nobody means."""
    need(mask is not None or mode == 0, operator, f"sparse_mode={mode} without atten_mask masks nothing")
    if mask is not None:
        need(mask.dtype in (torch.bool, torch.uint8), operator, f"atten_mask is bool or uint8, not {mask.dtype}")
        if mode in (2, 3, 4):
            need_compressed(operator, mode, mask)


def need_heads(operator: str, query: Tensor, key: Tensor, value: Tensor) -> None:
    """[B, heads, S, d] each: head sizes, and groups of query heads."""
    heads, size, groups = query.shape[1], query.shape[3], key.shape[1]
    need(query.shape[3] == key.shape[3], operator, f"head sizes of query and key differ: {size}, {key.shape[3]}")
    need(1 <= size <= LARGEST_HEAD, operator, f"head size {size} is outside 1 … {LARGEST_HEAD}")
    need(value.shape[3] <= size, operator, f"value's head size {value.shape[3]} is above that of key, {size}")
    need(key.shape[:3] == value.shape[:3], operator, f"key {tuple(key.shape)} and value {tuple(value.shape)} differ")
    need(groups > 0 and heads % groups == 0, operator, f"{heads} query heads are no multiple of {groups} key heads")


def need_rows(operator: str, hidden: Tensor | None, allowed: bool, advice: str) -> None:
    """No query without a key, unless the call says how to treat one."""
    if hidden is not None and not allowed:
        need(not bool(hidden.all(-1).any()), operator, f"a row of the mask hides every key; {advice}")


def need_ends(operator: str, ends: Sequence[int] | None, name: str, tokens: int) -> None:
    """Cumulative lengths of sequences end to end, without the leading 0; zeros at the end are sequences left out."""
    need(ends is not None and len(ends) > 0, operator, f"input_layout TND needs {name}")
    assert ends is not None
    need(len(ends) <= MOST_SEQUENCES, operator, f"{name} has {len(ends)} sequences, above {MOST_SEQUENCES}")
    real = list(ends)
    while len(real) > 1 and real[-1] == 0:
        real.pop()
    need(all(a <= b for a, b in pairwise(real)), operator, f"{name} is not cumulative: {real[:9]}")
    need(real[-1] == tokens, operator, f"{name} ends at {real[-1]}, and there are {tokens} tokens")


def need_absent(operator: str, **options: object) -> None:
    """Options of the operator that the simulated card does not have."""
    given = [name for name, value in options.items() if value is not None]
    need(not given, operator, f"the simulated card does not know {', '.join(given)}")
