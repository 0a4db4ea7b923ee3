"""Tensors as one safetensors file, written by all who hold pieces of them, none of whom holds the whole.

    first rank   ──▶ header (names, shapes, places), and room for the tensors
    every rank   ──▶ its pieces, each where it belongs; what is whole on every rank is written by the first

Pieces are ranges of rows, whose bytes lie side by side in the file, or of columns, whose bytes do row by row: the file
is the same whatever the layout was.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from runner.shards import local, span

ALIASES = "aliases"  # header entry: JSON object, name → the tensor it is tied to
RESERVED = "__metadata__"  # safetensors' own key
TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}  # as safetensors writes them


def create(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Make the file for these tensors, tied ones once, with their values still missing. Raises OSError."""
    head, places = layout(tensors)
    with path.open("xb") as file:
        file.write(head)
        file.truncate(len(head) + max((end for _, end in places.values()), default=0))


def write(path: Path, tensors: Mapping[str, Tensor], *, first: bool) -> None:
    """Write what this rank holds of them into the file that `create` made, and flush it to the disk. Raises OSError.

    All ranks have the same `layout`. Nothing of the file is read: NFS writes all of a page that was read, and with it
    what the page held before another machine wrote into it.
    """
    head, places = layout(tensors)
    with os.fdopen(os.open(path, os.O_WRONLY), "wb") as file:
        for name, (begin, _) in places.items():
            tensor = tensors[name]
            if _writes(tensor, first):
                held = local(tensor).cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
                start = len(head) + begin
                for at, count in _runs(tensor):
                    file.seek(start + at * tensor.element_size())
                    run, held = np.split(held, [count * tensor.element_size()])
                    file.write(run.data)
        file.flush()
        os.fsync(file.fileno())


def layout(tensors: Mapping[str, Tensor]) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """How a file of these tensors begins, and where behind that each of them lies, tied ones once: the first byte, and
    the one after the last."""
    own, aliases = untied(tensors)
    header: dict[str, Any] = {RESERVED: {ALIASES: json.dumps(aliases)}}
    places: dict[str, tuple[int, int]] = {}
    end = 0
    for name in sorted(own, key=lambda name: (-own[name].element_size(), name)):  # so that all stay aligned
        begin, end = end, end + own[name].numel() * own[name].element_size()
        kind, shape = TYPES[own[name].dtype], list(own[name].shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
        places[name] = begin, end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, places


def _writes(tensor: Tensor, first: bool) -> bool:
    """Whether this rank is the one that writes what it holds."""
    if not isinstance(tensor, DTensor):
        return first
    placed = zip(tensor.placements, tensor.device_mesh.get_coordinate() or (), strict=True)
    copies = [at for placement, at in placed if placement.is_replicate()]
    return not any(copies) and local(tensor).numel() > 0


def _runs(tensor: Tensor) -> Iterator[tuple[int, int]]:
    """Where in the whole tensor the numbers lie that this rank holds, in their order: first and how many."""
    where, shape = span(tensor), tensor.shape
    cut = [dim for dim, part in enumerate(where) if part != slice(0, shape[dim])]
    last = cut[-1] if cut else 0  # whatever comes after this dimension lies side by side
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    count = prod(part.stop - part.start for part in where[last:])
    for index in product(*(range(part.start, part.stop) for part in where[:last])):
        first = sum(at * stride for at, stride in zip(index, strides, strict=False))
        yield first + (where[last].start * strides[last] if where else 0), count


def untied(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors without those that are the very same memory as an earlier one, and which is whose alias."""
    own: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):  # of which a rank may hold nothing
            own[name] = tensor
            continue
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and key in seen:
            aliases[name] = seen[key]
        else:
            own[name] = tensor
            seen[key] = name
    return own, aliases
