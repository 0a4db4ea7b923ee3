"""Micro-batches: whole units of a batch, packed by best fit into as few token budgets as it finds."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runner.core.batch import Batch, prefixes, row_sum, select_units, unit_spans
from runner.core.media import MEDIA_ID

PATCHES_PER_PLACE = 4  # the vision parts of most families merge 2 x 2 patches of an image into one of its places


@dataclass(frozen=True, slots=True)
class Footprints:
    """What units take up on a device, int64 [units].

    tokens: without padding; paths, longest: with it every path is a row as long as the longest; else None
    patches: of their images, which the vision part computes beside the tokens
    """

    tokens: NDArray[np.int64]
    patches: NDArray[np.int64]
    paths: NDArray[np.int64] | None = None
    longest: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, units: slice | NDArray[np.int64]) -> Footprints:
        if self.paths is None or self.longest is None:
            return Footprints(self.tokens[units], self.patches[units])
        return Footprints(self.tokens[units], self.patches[units], self.paths[units], self.longest[units])

    def slots(self) -> NDArray[np.int64]:
        """Slots (tokens, padding, patches) of the first unit, of the first two together, … of all, [units]."""
        if self.paths is None or self.longest is None:
            return np.cumsum(self.tokens + self.patches)
        padded = np.cumsum(self.paths) * np.maximum.accumulate(self.longest)
        return padded + np.cumsum(self.patches)


def footprints(batch: Batch, padded: bool) -> Footprints:
    """What each unit takes up."""
    spans, patches, rows = unit_spans(batch), _num_patches(batch), batch.structure.rows
    if not padded:
        return Footprints(spans[:, 2], patches)
    before, is_leaf = prefixes(batch).numpy(), np.ones(len(rows["lengths"]), np.int64)
    is_leaf[before[before >= 0]] = 0
    whole = (rows["start"] + rows["lengths"]).cpu().numpy()  # of each row with what it continues
    paths, longest = np.add.reduceat(is_leaf, spans[:, 0]), np.maximum.reduceat(whole, spans[:, 0])
    return Footprints(spans[:, 2], patches, paths, longest)


def _num_patches(batch: Batch) -> NDArray[np.int64]:
    """Patches of the images of each unit, by their places, int64 [units]."""
    structure, spans = batch.structure, unit_spans(batch)
    if "media" in structure.rows:
        places = structure.rows["media"]
    elif bool((is_image := structure.tokens["ids"] >= MEDIA_ID).any()):
        places = row_sum(structure, is_image.long())
    else:
        return np.zeros(len(spans), np.int64)
    return PATCHES_PER_PLACE * np.add.reduceat(places.cpu().numpy(), spans[:, 0])


def pack_units(taken: Footprints, budget: int) -> list[list[int]]:
    """The units of each micro-batch, which take at most `budget` slots; a larger unit is alone.

    Best fit: the largest unit first, each into the fullest micro-batch that it fits into. With padding the longest
    unit first, each behind the one before it.
    """
    found = list[list[int]]()
    if taken.longest is not None:
        order, start = np.argsort(-taken.longest, kind="stable"), 0
        while start < len(order):
            slots = taken[order[start : start + budget]].slots()
            stop = start + max(int(np.searchsorted(slots, budget, side="right")), 1)
            found.append(order[start:stop].tolist())
            start = stop
    else:
        sizes, rooms = (taken.tokens + taken.patches).tolist(), list[tuple[int, int]]()
        for unit in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
            at = bisect_left(rooms, (sizes[unit],))
            room, micro = rooms.pop(at) if at < len(rooms) else (budget, len(found))
            if micro == len(found):
                found.append([])
            found[micro].append(unit)
            insort(rooms, (room - sizes[unit], micro))
    return sorted(map(sorted, found))


def micro_batches(batch: Batch, max_tokens: int, *, padded: bool = False) -> Iterator[Batch]:
    """Whole units in batches that take at most `max_tokens` token slots each (see `pack_units`).

    A slot is a token, a patch of an image or, for a model that runs padded, padding up to the longest row.
    """
    yield from split_units(batch, pack_units(footprints(batch, padded), max_tokens), unit_spans(batch))


def split_units(batch: Batch, parts: Sequence[Sequence[int]], spans: NDArray[np.int64]) -> list[Batch]:
    """Batches of these units of a batch; spans: its `unit_spans`."""
    order = np.array([unit for part in parts for unit in part], np.int64)
    if not len(order):
        return []
    edges = np.append(0, np.cumsum(spans[order, 1] - spans[order, 0]))[np.cumsum([0, *map(len, parts)])]
    return select_units(batch, order, spans).split(edges.tolist())
