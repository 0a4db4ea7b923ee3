"""Rows of an Arrow schema as files that are appended to while rows come, and memory-mapped after.

    a number         NAME            the values of all rows
    a list, a text   NAME.offsets    int64: where each row's values begin in NAME.item, and where the last one's end
    a struct         NAME.FIELD …    one column per field

A column is one array over its files: opening reads nothing, rows are read where they lie, and processes share pages.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable
from typing import IO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


class ColumnWriter:
    """Appends the rows of record batches to the files of their columns."""

    def __init__(self, schema: pa.Schema, open_file: Callable[[str], IO[bytes]]) -> None:
        """open_file: an empty file for a name."""
        self.digests: dict[str, hashlib._Hash] = defaultdict(hashlib.sha256)  # of each file's bytes so far
        self._open, self._files, self._ends = open_file, dict[str, IO[bytes]](), dict[str, int]()
        self.write(pa.RecordBatch.from_pylist([], schema))  # so that every file is there

    def write(self, batch: pa.RecordBatch) -> None:
        """Append the rows of a batch. Raises ValueError for a missing value."""
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            self._append(name, column)

    def _append(self, name: str, column: pa.Array) -> None:
        if column.null_count:
            raise ValueError(f"column {name}: {column.null_count} rows without a value")
        if pa.types.is_struct(column.type):
            for field, values in zip(column.type, column.flatten(), strict=True):
                self._append(f"{name}.{field.name}", values)
        elif pa.types.is_boolean(column.type):
            self._append(name, column.cast(pa.int8()))
        elif pa.types.is_primitive(column.type):
            self._write(name, column.to_numpy(zero_copy_only=False))
        else:
            if pa.types.is_large_string(column.type):  # a list of bytes
                _, offsets, content = column.cast(pa.large_binary()).buffers()
                size = len(column) + 1
                given = pa.Array.from_buffers(pa.int64(), size, [None, offsets]) if len(column) else pa.array([0])
                items = pa.Array.from_buffers(pa.uint8(), given[-1].as_py(), [None, content or pa.py_buffer(b"")])
                column = pa.LargeListArray.from_arrays(given, items)
            ends = column.offsets.to_numpy().astype(np.int64)
            if name not in self._ends:
                self._write(f"{name}.offsets", np.zeros(1, np.int64))
            before = self._ends.get(name, 0)
            self._ends[name] = before + int(ends[-1] - ends[0])
            self._write(f"{name}.offsets", before + ends[1:] - ends[0])
            self._append(f"{name}.item", column.flatten())

    def _write(self, name: str, values: NDArray[np.generic]) -> None:
        if name not in self._files:
            self._files[name] = self._open(name)
        content = np.ascontiguousarray(values).tobytes()
        self.digests[name].update(content)
        self._files[name].write(content)

    def sync(self) -> None:
        """Wait until the files are on the disk."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())


def read_columns(schema: pa.Schema, read: Callable[[str], pa.Buffer]) -> pa.RecordBatch:
    """All rows, over the buffers of their files. read: the content of a file."""

    def column(name: str, kind: pa.DataType) -> pa.Array:
        if pa.types.is_struct(kind):
            return pa.StructArray.from_arrays(
                [column(f"{name}.{one.name}", one.type) for one in kind], fields=list(kind)
            )
        if pa.types.is_boolean(kind):
            return column(name, pa.int8()).cast(kind)
        if pa.types.is_primitive(kind):
            content = read(name)
            return pa.Array.from_buffers(kind, content.size * 8 // kind.bit_width, [None, content])
        offsets = column(f"{name}.offsets", pa.int64())
        if pa.types.is_large_string(kind):
            buffers = [None, offsets.buffers()[1], read(f"{name}.item")]
            return pa.Array.from_buffers(kind, len(offsets) - 1, buffers)
        return pa.LargeListArray.from_arrays(offsets, column(f"{name}.item", kind.value_type))

    found = [column(one.name, one.type) for one in schema]
    return pa.RecordBatch.from_arrays(found, names=schema.names)
