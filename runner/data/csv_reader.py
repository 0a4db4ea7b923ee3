"""CSV to rows: a header, comma-separated, every value text; nothing is taken for a number or a date."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from runner.data.lines import MAX_ROW_BYTES, read_lines
from runner.data.rows import Place, Problems, Row


def read_csv(file: Path, problems: Problems) -> Iterator[Row]:
    """Rows under the header's names; a row stands at the line where it begins, as fields may hold line breaks."""
    csv.field_size_limit(MAX_ROW_BYTES)  # the module's own limit of 128 KiB is below a long text
    records = _records(file, problems)
    header = next(records, None)
    if header is None or not _header_is_sound(header, problems):
        return
    names, rows = header[1], 0
    for place, fields in records:
        rows += 1
        if len(fields) == len(names):
            yield Row(place, dict(zip(names, fields, strict=True)))
        else:
            problems.add(place, f"{len(fields)} fields; expected {len(names)}, as the header has: {', '.join(names)}")
    if not rows and not problems.count:
        problems.add(str(file), "a header and no rows; expected at least one row")


def _records(file: Path, problems: Problems) -> Iterator[tuple[Place, list[str]]]:
    """Every record with its place, blank lines left out; broken quoting ends the reading."""
    reader = csv.reader((line.text for line in read_lines(file, problems)), strict=True)
    first = 1
    try:
        for fields in reader:
            if fields:
                yield Place(str(file), first), fields
            first = reader.line_num + 1
    except csv.Error as error:
        problems.add(
            Place(str(file), first), f"broken CSV in the row that begins here: {error}; expected quotes in pairs"
        )


def _header_is_sound(header: tuple[Place, list[str]], problems: Problems) -> bool:
    place, names = header
    unsound = sorted({name for name in names if names.count(name) > 1 or not name})
    if unsound:
        problems.add(place, f"the header's names are not distinct or empty: {unsound}; expected one name per column")
    return not unsound
