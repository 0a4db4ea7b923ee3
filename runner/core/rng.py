"""Random streams: a stream's seed is a function of the run's seed and of its purpose, never stored."""

from __future__ import annotations

import hashlib
import json


def derive_seed(seed: int, *parts: int | str) -> int:
    """A 63-bit seed for the stream called `parts`, e.g. `derive_seed(seed, "dropout", step, micro)`.

    Equal arguments give equal seeds on every machine and version; ("a", 1), ("a1",) and ("a", "1") all differ.
    Raises TypeError for a part that is neither int nor str: its text form could change under us.
    """
    for part in (seed, *parts):
        if type(part) not in (int, str):
            raise TypeError(f"a random stream is named by ints and strings, not by {part!r} ({type(part).__name__})")
    text = json.dumps([seed, *parts], separators=(",", ":"))  # JSON quotes strings, so no two lists read the same
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
