"""Numbers and foreign text in one readable line of a terminal. Pure functions, and print_text."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from itertools import pairwise
from typing import TextIO

BARS = "▁▂▃▄▅▆▇█"
# What a terminal would obey instead of show: controls, line and paragraph separators, halves of characters, and marks
# that reverse the direction of text.
HIDDEN = frozenset({"Cc", "Cs", "Zl", "Zp"})
BIDI = frozenset(map(chr, (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))))


def escape_for_terminal(text: str) -> str:
    """The text on one line with every control character written out, such as \\n or \\x1b."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escape(c) if unicodedata.category(c) in HIDDEN or c in BIDI else c for c in text)


def escape_controls(text: str) -> str:
    """The text with its lines and tabs, and every other control character (C0, C1) written out."""
    return "".join(_escape(c) if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text)


def print_text(text: str, *, end: str = "\n", file: TextIO | None = None, flush: bool = False) -> None:
    """Print text with its control characters written out: a name in it may come from a file or a web page."""
    print(escape_controls(text), end=end, file=file, flush=flush)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def labeled_line(word: str, text: str) -> str:
    """A line that begins with a word of at most 8 letters, in a column of its own."""
    return f"{word:<8}  {text}"


def format_number(value: float) -> str:
    """Four significant digits: 0.01234, 1.2e-05, 12345."""
    if isinstance(value, int) or (math.isfinite(value) and value == int(value) and abs(value) < 1e9):
        return str(int(value))
    if math.isfinite(value) and abs(value) >= 1000:
        return f"{value:.0f}" if abs(value) < 1e9 else f"{value:.3e}"
    return f"{value:.4g}"


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of text, aligned; nothing is cut."""
    cells = [[escape_for_terminal(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in cells]


def count_noun(count: int, noun: str) -> str:
    """1 step, 2 steps."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def format_rate(value: float) -> str:
    """A count per second: 950, 12.3k, 4.56M."""
    return _scale(value, ("G", "M", "k")) or f"{value:.3g}"


def format_bytes(value: float) -> str:
    """Bytes: 512 B, 3.4 MB, 41.2 GB (powers of 1000)."""
    return _scale(value, (" GB", " MB", " kB")) or f"{value:.0f} B"


def _scale(value: float, units: Sequence[str]) -> str:
    """In the largest of the units of 10⁹, 10⁶, 10³ that it fills; empty below them."""
    fitting = ((limit, unit) for limit, unit in zip((1e9, 1e6, 1e3), units, strict=True) if value >= limit)
    return next((f"{value / limit:.3g}{unit}" for limit, unit in fitting), "")


def format_duration(seconds: float) -> str:
    """00:11, 1:02:03, 3d 04:05."""
    if not math.isfinite(seconds):
        return "--:--"
    minutes, rest = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes:02}:{rest:02}"


def sparkline(values: Sequence[float], width: int) -> str:
    """At most `width` bars from the smallest to the largest value; what is not finite is left out."""
    finite = [v for v in values if math.isfinite(v)]
    if not finite or width < 1:
        return ""
    count = min(width, len(finite))
    edges = [len(finite) * i // count for i in range(count + 1)]
    means = [math.fsum(finite[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, span = min(means), max(means) - min(means)
    return "".join(BARS[int((v - low) / span * (len(BARS) - 1) + 0.5)] if span > 0 else BARS[0] for v in means)
