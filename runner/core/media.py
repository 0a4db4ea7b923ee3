"""Images in token ids: one id above every vocabulary, as often as the image takes places.

    ids of the vocabulary   0 … vocab_size - 1
    an image                MEDIA_ID + 61 bits of a digest of its content and of how it is processed

So an image travels with its row: through packing, shared prompts, caches, journals and process groups, and rows that
differ in an image alone are different rows. The model's forward replaces the ids (runner.model.media).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence

MEDIA_ID = 1 << 61


def media_id(content: bytes, how: str) -> int:
    """The id of an image: `content` is its encoded file, `how` says how it is processed."""
    digest = hashlib.sha256(hashlib.sha256(content).digest() + how.encode()).digest()
    return MEDIA_ID | int.from_bytes(digest[:8], "big") >> 3


def without_media(ids: Iterable[int]) -> list[int]:
    """The ids of the vocabulary among `ids`."""
    return [one for one in ids if one < MEDIA_ID]


def media_runs(ids: Sequence[int], count: Callable[[int], int]) -> list[tuple[int, list[int]]]:
    """Each image in a row's ids, in order: (its id, its places). count: the number of places of an image.

    Raises ValueError for an image that is not whole.
    """
    runs: list[tuple[int, list[int]]] = []
    for place, one in enumerate(ids):
        if one >= MEDIA_ID:
            if not runs or runs[-1][0] != one or len(runs[-1][1]) == count(one):
                runs.append((one, []))
            runs[-1][1].append(place)
    if cut := [one for one, places in runs if len(places) != count(one)]:
        raise ValueError(f"{len(cut)} images are not whole; each stands for a fixed number of token ids")
    return runs


def whole_images(ids: Sequence[int], start: int, stop: int, count: Callable[[int], int]) -> tuple[int, int]:
    """The part of start … stop that cuts through no image. count: the number of places of an image."""
    spans = [(places[0], places[-1] + 1) for _, places in media_runs(ids, count)]
    for first, last in spans:
        start = last if first < start < last else start
    for first, last in reversed(spans):
        stop = first if first < stop < last else stop
    return start, max(start, stop)
