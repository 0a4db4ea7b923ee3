"""Bytes of a file to decoded lines with their places; what is not UTF-8 or far too long is a problem."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from runner.data.rows import Place, Problems

MAX_ROW_BYTES = 16 * 2**20  # a longer row is no training example but a mistake, e.g. a JSON list in a .jsonl
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Line:
    """One decoded line with its line end, if it has one."""

    place: Place
    text: str


def read_lines(file: Path, problems: Problems, limit: int | None = MAX_ROW_BYTES) -> Iterator[Line]:
    """Decoded lines of at most `limit` bytes (None: any length).

    A byte that is not UTF-8 is a problem; its line is read on with marks in its place, to find more faults.
    """
    for number, start, raw in _raw_lines(file, problems, limit):
        place = Place(str(file), number)
        if number == 1 and raw.startswith(BOM):
            start, raw = start + len(BOM), raw[len(BOM) :]
        try:
            yield Line(place, raw.decode())
        except UnicodeDecodeError as error:
            problems.add(place, _not_utf8(raw, error, start))
            yield Line(place, raw.decode(errors="replace"))


def _raw_lines(file: Path, problems: Problems, limit: int | None) -> Iterator[tuple[int, int, bytes]]:
    """(line number, byte offset, bytes) of each line; one above the limit is a problem and left out."""
    most = -1 if limit is None else limit + 1
    number, offset = 0, 0
    with file.open("rb") as handle:
        while raw := handle.readline(most):
            number, start = number + 1, offset
            offset += len(raw)
            if limit is None or len(raw) <= limit:
                yield number, start, raw
                continue
            problems.add(
                Place(str(file), number), f"a row of more than {limit >> 20} MiB; expected one training example"
            )
            while raw and not raw.endswith(b"\n"):
                raw = handle.readline(most)
                offset += len(raw)


def _not_utf8(raw: bytes, error: UnicodeDecodeError, start: int) -> str:
    utf16 = "; it looks like UTF-16" if start == 0 and raw[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
    at = f"byte offset {start + error.start} (0x{raw[error.start]:02x})"
    return f"not UTF-8 at {at}; save the file as UTF-8{utf16}"
