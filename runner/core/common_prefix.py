"""What two sequences begin with alike."""

from __future__ import annotations

from collections.abc import Sequence


def common_length(first: Sequence[object], second: Sequence[object]) -> int:
    """How many items two sequences begin with alike."""
    differ = (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return next(differ, min(len(first), len(second)))
