"""JSONL and JSON to rows, by a strict reading of JSON: no NaN, no key twice, nothing coerced."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runner.data.lines import read_lines
from runner.data.rows import Place, Problems, Row

BLANKS = re.compile(r"[ \t\r\n]*")
SURROGATE = re.compile(r"[\ud800-\udfff]")
KINDS: dict[type, str] = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}


def kind(value: Any) -> str:
    """The word for the JSON type of `value`."""
    return KINDS.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)


def read_jsonl(file: Path, problems: Problems) -> Iterator[Row]:
    """One object a line; blank lines hold no row."""
    blank = True
    for line in read_lines(file, problems):
        if not line.text.strip():
            continue
        blank = False
        try:
            value = DECODER.decode(line.text.rstrip("\r\n"))
        except (ValueError, RecursionError) as error:
            cut = "" if line.text.endswith("\n") else "; the last line has no line end: the file may be cut off"
            problems.add(line.place, f"{_fault(error)}; expected one JSON object a line{cut}")
            continue
        yield from _row(line.place, value, line.text, problems)
    if blank:
        problems.add(str(file), "only blank lines; expected at least one row")


def read_json(file: Path, problems: Problems) -> Iterator[Row]:
    """A list of objects, held in memory; broken JSON ends the reading, for nothing after it can be trusted."""
    text = "".join(line.text for line in read_lines(file, problems, limit=None))
    start = _skip(text, 0)
    if text[start : start + 1] != "[":
        place = Place(str(file), text.count("\n", 0, start) + 1)
        problems.add(place, "expected a list of objects, [{...}, ...]; a file with one object a line is named .jsonl")
        return
    line, counted, rows = 1, 0, 0
    try:
        for value, begin, end in _elements(text, start + 1):
            line, counted, rows = line + text.count("\n", counted, begin), begin, rows + 1
            yield from _row(Place(str(file), line), value, text[begin:end], problems)
    except _Broken as broken:
        number = text.count("\n", 0, broken.position) + 1
        problems.add(Place(str(file), number), f"{broken}; expected a list of objects")
        return
    if not rows:
        problems.add(str(file), "the list is empty; expected at least one row")


class _Broken(Exception):
    """JSON that cannot be read on from `position`."""

    def __init__(self, message: str, position: int) -> None:
        super().__init__(message)
        self.position = position


def _elements(text: str, at: int) -> Iterator[tuple[Any, int, int]]:
    """(value, begin, end) of each element of the list whose bracket stands before `at`."""
    at = _skip(text, at)
    more = text[at : at + 1] != "]"
    while more:
        try:
            value, end = DECODER.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise _Broken(_fault(error), error.pos) from error
        except (ValueError, RecursionError) as error:
            raise _Broken(_fault(error), at) from error
        yield value, at, end
        at = _skip(text, end)
        more = text[at : at + 1] == ","
        if more:
            at = _skip(text, at + 1)
    if text[at : at + 1] != "]":
        what = "the file ends" if at >= len(text) else f"found {text[at]!r}"
        raise _Broken(f"broken JSON: {what} where , or ] must follow", at)
    if _skip(text, at + 1) < len(text):
        raise _Broken("broken JSON: more text after the list", _skip(text, at + 1))


def _skip(text: str, at: int) -> int:
    blank = BLANKS.match(text, at)
    return blank.end() if blank else at


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return found


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant)


def _fault(error: ValueError | RecursionError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"broken JSON at column {error.colno}: {error.msg}"
    return "objects are nested too deeply" if isinstance(error, RecursionError) else str(error)


def _row(place: Place, value: Any, source: str, problems: Problems) -> Iterator[Row]:
    """The row, if it is an object of whole characters."""
    if not isinstance(value, dict):
        problems.add(place, f"expected an object with columns, {{...}}, found {kind(value)}")
    # "\ud83d" alone is legal JSON and no text: it would fail later, inside a tokenizer, without a line number
    elif "\\u" in source and SURROGATE.search(json.dumps(value, ensure_ascii=False)):
        problems.add(place, "half a surrogate pair (\\ud800-\\udfff alone); expected whole characters")
    else:
        yield Row(place, value)
