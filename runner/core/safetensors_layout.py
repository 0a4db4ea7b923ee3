"""Layout of a safetensors file, so that tensors can be written in any order, by several processes.

length of the header, uint64 │ header, JSON: name → type, shape, first and last byte │ tensors, widest types first
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

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
SIZES = {kind: dtype.itemsize for dtype, kind in TYPES.items()}


@dataclass(frozen=True, slots=True)
class FileLayout:
    """Header of a file, and the byte range of each tensor behind it."""

    head: bytes
    byte_ranges: Mapping[str, tuple[int, int]]

    @property
    def num_bytes(self) -> int:
        """Size of the tensors."""
        return max((end for _, end in self.byte_ranges.values()), default=0)


def compute_layout(tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]) -> FileLayout:
    """The layout for tensors of these types and shapes, the same for any order of them.

    If all have one type, it is byte for byte that of the safetensors package.
    """
    header: dict[str, Any] = {RESERVED: dict(metadata)}
    places: dict[str, tuple[int, int]] = {}
    end = 0
    for name in sorted(tensors, key=lambda name: (-SIZES[tensors[name][0]], name)):  # so that all stay aligned
        kind, shape = tensors[name]
        begin, end = end, end + prod(shape) * SIZES[kind]
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [begin, end]}
        places[name] = begin, end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return FileLayout(len(text).to_bytes(8, "little") + text, places)


def create_file(path: Path, layout: FileLayout) -> None:
    """Make the file, with the tensors' values still missing. Raises OSError."""
    with path.open("xb") as file:
        file.write(layout.head)
        file.truncate(len(layout.head) + layout.num_bytes)
