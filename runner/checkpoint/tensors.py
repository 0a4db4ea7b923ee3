"""Tensors as one safetensors file, written by all who hold pieces of them, none of whom holds the whole.

    first rank   ──▶ header (names, shapes, places), and room for the tensors
    every rank   ──▶ its pieces, each where it belongs

Pieces are ranges of rows, whose bytes lie side by side in the file, or of columns, whose bytes do row by row: the file
is the same whatever the layout was.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from runner.shards import local, span
from runner.tensor_file import TYPES, Layout, arranged

ALIASES = "aliases"  # header entry: JSON object, name → the tensor it is tied to


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor as the file knows it: its type, its shape, and the name of the tensor that it is tied to, if any."""

    kind: str
    shape: tuple[int, ...]
    tied: str | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """What one rank writes of a tensor of `shape`: values, on any device, and where in the tensor they lie."""

    values: Tensor
    where: tuple[slice, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Piece:
        """What this rank holds of it, in the tensor's own memory."""
        return cls(local(tensor), span(tensor), tuple(tensor.shape))

    def runs(self) -> Iterator[tuple[int, int]]:
        """Where in the whole tensor the values lie, in their order: first number, and how many."""
        where, shape = self.where, self.shape
        cut = [dim for dim, part in enumerate(where) if part != slice(0, shape[dim])]
        last = cut[-1] if cut else 0  # whatever comes after this dimension lies side by side
        strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
        count = prod(part.stop - part.start for part in where[last:])
        for index in product(*(range(part.start, part.stop) for part in where[:last])):
            first = sum(at * stride for at, stride in zip(index, strides, strict=False))
            yield first + (where[last].start * strides[last] if where else 0), count


def listing(tensors: Mapping[str, Tensor]) -> dict[str, Entry]:
    """What the file has to know of these tensors, of which this rank may hold pieces."""
    tied = _tied(tensors)
    return {name: Entry(TYPES[t.dtype], tuple(t.shape), tied.get(name)) for name, t in tensors.items()}


def layout(entries: Mapping[str, Entry]) -> Layout:
    """The file of these tensors, tied ones once, the same for any order of them."""
    own = {name: (entry.kind, entry.shape) for name, entry in entries.items() if entry.tied is None}
    aliases = {name: entries[name].tied for name in sorted(entries.keys() - own.keys())}
    return arranged(own, {ALIASES: json.dumps(aliases)})


def write(path: Path, layout: Layout, pieces: Mapping[str, Piece]) -> None:
    """Write what this rank has to write into the file that `create` made, and flush it to the disk. Raises OSError.

    Nothing of the file is read: NFS writes all of a page that was read, and with it what the page held before another
    machine wrote into it.
    """
    with os.fdopen(os.open(path, os.O_WRONLY), "wb") as file:
        for name, piece in pieces.items():
            held = piece.values.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            size, start = piece.values.element_size(), len(layout.head) + layout.places[name][0]
            for at, count in piece.runs():
                file.seek(start + at * size)
                run, held = np.split(held, [count * size])
                file.write(run.data)
        file.flush()
        os.fsync(file.fileno())


def writes(tensor: Tensor) -> bool:
    """Whether this rank writes what it holds: of copies on a mesh the first is enough, and nothing is no piece."""
    if not isinstance(tensor, DTensor):
        return True
    placed = zip(tensor.placements, tensor.device_mesh.get_coordinate() or (), strict=True)
    copies = [at for placement, at in placed if placement.is_replicate()]
    return not any(copies) and local(tensor).numel() > 0


def _tied(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Those that are the very same memory as an earlier one, and as which."""
    tied: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor) or not tensor.numel():  # of which a rank may hold nothing
            continue
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if (first := seen.setdefault(key, name)) != name:
            tied[name] = first
    return tied
