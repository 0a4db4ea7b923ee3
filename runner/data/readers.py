"""Text files to rows, strictly: nothing is coerced or skipped, and errors name file and line.

    lines           UTF-8, gzip if the name ends in .gz; another encoding, or a line over 16 MiB, is a fault
    JSONL, JSON     no NaN, no key twice; a key with null is a missing key
    CSV, TSV        a header, separated by commas or tabs; every value is text, never a number or a date
    TXT             one row a line, column `text`; blank lines are no rows

`datasets` does not parse the text: its JSON reader turns a column of strings into integers or dates when
some values look like them, and lets broken bytes and missing columns pass. No torch, no transformers here.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from runner.core.columns import json_type_name
from runner.core.errors import DataError
from runner.core.untrusted_text import check_depth, without_nulls

MAX_SHOWN = 10  # different problems that a message spells out; the rest is counted
MAX_NUMBERS = 20  # rows that a message names for one problem


@dataclass(frozen=True, slots=True)
class SourceLocation:
    """Where a row stands: a file and a 1-based line, or a source without lines and a 1-based row."""

    source: str
    number: int
    unit: str = "line"

    def __str__(self) -> str:
        return f"{self.source}:{self.number}" if self.unit == "line" else f"{self.source}: {self.unit} {self.number}"


@dataclass(frozen=True, slots=True)
class Row:
    """One row as it was read: column name → value, not yet checked against a format."""

    place: SourceLocation
    value: Mapping[str, Any]


@dataclass(slots=True)
class Fault:
    """A fault of one or several rows of a source; `numbers`: of the first rows."""

    count: int = 0
    numbers: list[int] = field(default_factory=list)

    def add(self, count: int, numbers: Sequence[int]) -> None:
        """Count more rows that have it."""
        self.count += count
        self.numbers += numbers[: MAX_NUMBERS - len(self.numbers)]

    def __str__(self) -> str:
        """The numbers, neighbors as 2-5, and how many more rows there are."""
        groups = groupby(enumerate(self.numbers), key=lambda pair: pair[1] - pair[0])
        ranges = [[number for _, number in group] for _, group in groups]
        shown = [str(one[0]) if len(one) == 1 else f"{one[0]}-{one[-1]}" for one in ranges]
        more = self.count - len(self.numbers)
        return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


class Problems:
    """Collects the problems of a source: ten different ones with their rows, and the number of all."""

    def __init__(self, key: str, source: str) -> None:
        self.key = key  # the option that named the source, e.g. data.path
        self.source = source
        self.count = 0
        self._faults: dict[tuple[str, str, str], Fault] = {}  # source, unit, message
        self._hints: dict[str, None] = {}

    def add_fault(self, place: SourceLocation | str, message: str, hint: str = "") -> None:
        """One more fault; `hint` says what to type next and is shown once below all faults."""
        self.count += 1
        if isinstance(place, str):
            self._add((place, "", message), 1, [])
        else:
            self._add((place.source, place.unit, message), 1, [place.number])
        if hint:
            self.add_hint(hint)

    def add_hint(self, hint: str) -> None:
        """What to type, shown once below all faults."""
        self._hints[hint] = None

    def extend(self, other: Problems) -> None:
        """Add the problems of another part of the source."""
        self.count += other.count
        for known, fault in other._faults.items():
            self._add(known, fault.count, fault.numbers)
        self._hints |= other._hints

    def _add(self, known: tuple[str, str, str], count: int, numbers: Sequence[int]) -> None:
        if known in self._faults or len(self._faults) < MAX_SHOWN:
            self._faults.setdefault(known, Fault()).add(count, numbers)

    def error(self) -> DataError:
        """All of it as one error."""
        head = f"{self.key}={self.source}: {self.count} problem{'s' if self.count != 1 else ''}"
        shown = sum(fault.count for fault in self._faults.values())
        if self.count > shown:
            head += f" (the first {shown})"
        lines = [f"{_place_text(known, fault)}: {known[2]}" for known, fault in self._faults.items()]
        return DataError("\n  ".join([head, *lines, *self._hints]))

    def raise_if_any(self) -> None:
        """Raise DataError if anything was added."""
        if self.count:
            raise self.error()


def _place_text(known: tuple[str, str, str], fault: Fault) -> str:
    source, unit, _ = known
    if not unit:
        return source
    return f"{source}:{fault}" if unit == "line" else f"{source}: {unit}{'s' if fault.count > 1 else ''} {fault}"


MAX_ROW_BYTES = 16 * 2**20  # a longer row is no training example but a mistake, e.g. a JSON list in a .jsonl
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class TextLine:
    """One decoded line with its line end, if it has one."""

    place: SourceLocation
    text: str


def read_lines(file: Path, problems: Problems, limit: int | None = MAX_ROW_BYTES) -> Iterator[TextLine]:
    """Decoded lines of at most `limit` bytes (None: any length).

    A byte that is not UTF-8 is a problem; its line is read on with marks in its place, to find more faults.
    """
    for number, start, raw in _raw_lines(file, problems, limit):
        place = SourceLocation(str(file), number)
        if number == 1 and raw.startswith(BOM):
            start, raw = start + len(BOM), raw[len(BOM) :]
        try:
            yield TextLine(place, raw.decode())
        except UnicodeDecodeError as error:
            problems.add_fault(place, _not_utf8(raw, error, start))
            yield TextLine(place, raw.decode(errors="replace"))


def read_whole_text(file: Path, key: str) -> str:
    """The text of a user's file. Raises DataError where it is not UTF-8, OSError where it cannot be read."""
    problems = Problems(key, str(file))
    text = "".join(line.text for line in read_lines(file, problems, limit=None))
    problems.raise_if_any()
    return text


def _raw_lines(file: Path, problems: Problems, limit: int | None) -> Iterator[tuple[int, int, bytes]]:
    """(line number, byte offset, bytes) of each line; one above the limit is a problem and left out."""
    most = -1 if limit is None else limit + 1
    number, offset = 0, 0
    with gzip.open(file) if file.suffix.lower() == ".gz" else file.open("rb") as handle:
        while raw := handle.readline(most):
            number, start = number + 1, offset
            offset += len(raw)
            if limit is None or len(raw) <= limit:
                yield number, start, raw
                continue
            problems.add_fault(
                SourceLocation(str(file), number),
                f"a row of more than {limit >> 20} MiB; expected one training example",
            )
            while raw and not raw.endswith(b"\n"):
                raw = handle.readline(most)
                offset += len(raw)


def _not_utf8(raw: bytes, error: UnicodeDecodeError, start: int) -> str:
    utf16 = "; it looks like UTF-16" if start == 0 and raw[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
    at = f"byte offset {start + error.start} (0x{raw[error.start]:02x})"
    return f"not UTF-8 at {at}; save the file as UTF-8{utf16}"


def read_text(file: Path, problems: Problems) -> Iterator[Row]:
    """One row a line, in the column `text`, without its line end; blank lines hold no row."""
    number = 0
    for line in read_lines(file, problems):
        if line.text.strip():
            number += 1
            yield Row(line.place, {"text": line.text.rstrip("\r\n")})
    if not number:
        problems.add_fault(str(file), "only blank lines; expected at least one row")


KIND_OF_DELIMITER = {",": "CSV", "\t": "TSV"}


def read_csv(file: Path, problems: Problems, delimiter: str = ",") -> Iterator[Row]:
    """Rows by the header's names; a row's line is where it begins, as fields may have line breaks."""
    csv.field_size_limit(MAX_ROW_BYTES)  # the module's own limit of 128 KiB is below a long text
    records = _records(file, problems, delimiter)
    header = next(records, None)
    if header is None or not _header_is_sound(header, problems):
        return
    names, rows = header[1], 0
    for place, fields in records:
        rows += 1
        if len(fields) == len(names):
            yield Row(place, dict(zip(names, fields, strict=True)))
        else:
            problems.add_fault(
                place, f"{len(fields)} fields; expected {len(names)}, as the header has: {', '.join(names)}"
            )
    if not rows and not problems.count:
        problems.add_fault(str(file), "a header and no rows; expected at least one row")


def _records(file: Path, problems: Problems, delimiter: str) -> Iterator[tuple[SourceLocation, list[str]]]:
    """Every record with its place, blank lines left out; broken quoting ends the reading."""
    reader = csv.reader((line.text for line in read_lines(file, problems)), strict=True, delimiter=delimiter)
    first = 1
    try:
        for fields in reader:
            if fields:
                yield SourceLocation(str(file), first), fields
            first = reader.line_num + 1
    except csv.Error as error:
        problems.add_fault(
            SourceLocation(str(file), first),
            f"broken {KIND_OF_DELIMITER[delimiter]} in the row that starts here: {error}; expected quotes in pairs",
        )


def _header_is_sound(header: tuple[SourceLocation, list[str]], problems: Problems) -> bool:
    place, names = header
    unsound = sorted({name for name in names if names.count(name) > 1 or not name})
    if unsound:
        problems.add_fault(
            place, f"column names in the header are empty or repeated: {unsound}; expected one name per column"
        )
    return not unsound


BLANKS = re.compile(r"[ \t\r\n]*")
SURROGATE = re.compile(r"[\ud800-\udfff]")


def read_jsonl(file: Path, problems: Problems) -> Iterator[Row]:
    """One object a line; blank lines hold no row."""
    blank = True
    for line in read_lines(file, problems):
        if not line.text.strip():
            continue
        blank = False
        try:
            value = DECODER.decode(line.text.rstrip("\r\n"))
            check_depth(value)
        except (ValueError, RecursionError) as error:
            cut = "" if line.text.endswith("\n") else "; the last line has no newline: the file may be incomplete"
            problems.add_fault(line.place, f"{_fault(error)}; expected one JSON object a line{cut}")
            continue
        yield from _row(line.place, value, line.text, problems)
    if blank:
        problems.add_fault(str(file), "only blank lines; expected at least one row")


def read_json(file: Path, problems: Problems) -> Iterator[Row]:
    """A list of objects, held in memory; broken JSON ends the reading."""
    text = "".join(line.text for line in read_lines(file, problems, limit=None))
    start = _skip_blanks(text, 0)
    if text[start : start + 1] != "[":
        place = SourceLocation(str(file), text.count("\n", 0, start) + 1)
        problems.add_fault(
            place, "expected a list of objects, [{...}, ...]; a file with one object a line is named .jsonl"
        )
        return
    line, counted, rows = 1, 0, 0
    try:
        for value, begin, end in _list_elements(text, start + 1):
            line, counted, rows = line + text.count("\n", counted, begin), begin, rows + 1
            yield from _row(SourceLocation(str(file), line), value, text[begin:end], problems)
    except _Broken as broken:
        number = text.count("\n", 0, broken.position) + 1
        problems.add_fault(SourceLocation(str(file), number), f"{broken}; expected a list of objects")
        return
    if not rows:
        problems.add_fault(str(file), "the list is empty; expected at least one row")


class _Broken(Exception):
    """JSON that cannot be read on from `position`."""

    def __init__(self, message: str, position: int) -> None:
        super().__init__(message)
        self.position = position


def _list_elements(text: str, at: int) -> Iterator[tuple[Any, int, int]]:
    """(value, begin, end) of each element of the list whose bracket stands before `at`."""
    at = _skip_blanks(text, at)
    more = text[at : at + 1] != "]"
    while more:
        try:
            value, end = DECODER.raw_decode(text, at)
            check_depth(value)
        except json.JSONDecodeError as error:
            raise _Broken(_fault(error), error.pos) from error
        except (ValueError, RecursionError) as error:
            raise _Broken(_fault(error), at) from error
        yield value, at, end
        at = _skip_blanks(text, end)
        more = text[at : at + 1] == ","
        if more:
            at = _skip_blanks(text, at + 1)
    if text[at : at + 1] != "]":
        what = "the file ends" if at >= len(text) else f"found {text[at]!r}"
        raise _Broken(f"broken JSON: {what} where , or ] must follow", at)
    if _skip_blanks(text, at + 1) < len(text):
        raise _Broken("broken JSON: more text after the list", _skip_blanks(text, at + 1))


def _skip_blanks(text: str, at: int) -> int:
    blank = BLANKS.match(text, at)
    return blank.end() if blank else at


def _unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} appears twice in one object")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


DECODER = json.JSONDecoder(object_pairs_hook=_unique_object, parse_constant=_refuse_constant)


def _fault(error: ValueError | RecursionError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"broken JSON at column {error.colno}: {error.msg}"
    return "objects are nested too deeply" if isinstance(error, RecursionError) else str(error)


def _row(place: SourceLocation, value: Any, source: str, problems: Problems) -> Iterator[Row]:
    """The row, if it is an object of whole characters."""
    if not isinstance(value, dict):
        problems.add_fault(place, f"expected an object with columns, {{...}}, found {json_type_name(value)}")
    # "\ud83d" alone is legal JSON and no text: it would fail later, inside a tokenizer, without a line number
    elif "\\u" in source and SURROGATE.search(json.dumps(value, ensure_ascii=False)):
        problems.add_fault(place, "half a surrogate pair (\\ud800-\\udfff alone); expected whole characters")
    else:
        yield Row(place, without_nulls(value))
