"""A tensor as a few hundred numbers, from which the distance of two tensors is known though neither is kept.

    x [n] ─ random signs ─▶ ±x ─ sums over the places that are equal modulo WIDTH ─▶ sketch [WIDTH]

The count sketch of Charikar, Chen and Farach-Colton (2002), with buckets by place instead of by a hash. The squared
distance of two sketches is, on average over the signs, that of the tensors; its relative standard deviation is at most
√(2 / WIDTH) where the difference is spread over the tensor. Tensors of up to WIDTH numbers are kept exactly.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runner.parity.recording import Print
from runner.randomness import derive

WIDTH = 512
PIECE = WIDTH * 2**11  # numbers that are in memory in float64 at once


def sketch(tensor: Tensor) -> Print:
    """The print of a tensor of any type, on any device; summed in float64 on the CPU."""
    sums, squares = np.zeros(WIDTH), 0.0
    for number, piece in enumerate(torch.split(tensor.detach().reshape(-1), PIECE)):
        values = piece.cpu().double().numpy()
        squares += float(values @ values)
        signed = np.zeros(-(-len(values) // WIDTH) * WIDTH)
        signed[: len(values)] = values * _signs(number)[: len(values)]
        sums += signed.reshape(-1, WIDTH).sum(0)
    return Print(tuple(tensor.shape), float(np.sqrt(squares)), sums)


def first_tensor(value: object) -> Tensor | None:
    """The tensor that a module gives or takes: itself, or the first one of several, if it is of floating point."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        value = next((one for one in value if isinstance(one, Tensor)), None)
    return value if isinstance(value, Tensor) and torch.is_floating_point(value) else None


@lru_cache(maxsize=32)
def _signs(number: int) -> NDArray[np.int8]:
    """±1 for each place of a piece; the same on every machine."""
    words = np.random.PCG64(derive(0, "sketch", number)).random_raw(PIECE // 64).astype("<u8")
    return np.unpackbits(words.view(np.uint8)).astype(np.int8) * np.int8(2) - np.int8(1)
