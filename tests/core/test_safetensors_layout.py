"""A file that is laid out before its tensors are there is the one that safetensors would have written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save

from runner.core.safetensors_layout import TYPES, compute_layout, create_file

SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
NAMES = st.text("abc.01_", min_size=1, max_size=6)


@given(
    shapes=st.dictionaries(NAMES, SHAPES, min_size=1, max_size=6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8]),
)
def test_of_one_type_it_begins_and_ends_as_safetensors_has_it(
    shapes: dict[str, tuple[int, ...]], dtype: torch.dtype
) -> None:
    layout = compute_layout({name: (TYPES[dtype], shape) for name, shape in shapes.items()}, {"format": "pt"})
    wanted = save({name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}, {"format": "pt"})
    assert layout.head + bytes(layout.num_bytes) == wanted


def test_of_several_types_it_is_read_as_it_was_laid_out(tmp_path: Path) -> None:
    entries = {"a": ("U8", (3,)), "b": ("F64", (2, 2)), "c": ("BF16", ()), "d": ("F32", (5,))}
    layout, path = compute_layout(entries, {}), tmp_path / "file.safetensors"
    create_file(path, layout)
    assert [*layout.byte_ranges] == [
        "b",
        "d",
        "c",
        "a",
    ]  # the widest first, so that each begins at a multiple of its size
    read = load_file(path)
    assert {name: (TYPES[t.dtype], tuple(t.shape)) for name, t in read.items()} == entries
    with pytest.raises(FileExistsError):
        create_file(path, layout)
