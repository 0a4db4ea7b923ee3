"""Tensors as one safetensors file, written by all who hold pieces of them, none of whom holds the whole.

    first rank   ──▶ header (names, shapes, places), and room for the tensors
    every rank   ──▶ its pieces, each where it belongs; what is whole on every rank is written by the first

A piece is a range of rows, so its bytes lie side by side in the file: the file is the same whatever the layout was.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

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
    own, aliases = untied(tensors)
    header: dict[str, Any] = {RESERVED: {ALIASES: json.dumps(aliases)}}
    end = 0
    for name in sorted(own, key=lambda name: (-own[name].element_size(), name)):  # so that all stay aligned
        begin, end = end, end + own[name].numel() * own[name].element_size()
        kind, shape = TYPES[own[name].dtype], list(own[name].shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def write(path: Path, tensors: Mapping[str, Tensor], *, first: bool) -> None:
    """Write what this rank holds of them into the file that `create` made, and flush it to the disk. Raises OSError."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        for name, tensor in tensors.items():
            if name in header and (row := _first_row(tensor, first)) is not None:
                held = local(tensor).cpu().contiguous()
                at = row * prod(tensor.shape[1:]) * tensor.element_size()
                file.seek(8 + size + header[name]["data_offsets"][0] + at)
                file.write(held.reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def _first_row(tensor: Tensor, first: bool) -> int | None:
    """Where this rank's rows begin, if it is the one that writes them."""
    if not isinstance(tensor, DTensor):
        return 0 if first else None
    placed = zip(tensor.placements, tensor.device_mesh.get_coordinate() or (), strict=True)
    copies = [at for placement, at in placed if placement.is_replicate()]
    where = span(tensor)
    if where[1:] != tuple(slice(0, size) for size in tensor.shape[1:]):
        raise NotImplementedError(f"pieces that are not rows: {tensor.placements}")
    return None if any(copies) or not local(tensor).numel() else where[0].start


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
