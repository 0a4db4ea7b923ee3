"""Micro-batches: a packed batch, cut between its units so that each piece fits a token budget.

Legend: N rows, T tokens; a *unit* is what must not be cut (`runner.core.batch`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from runner.core.batch import Batch, prefixes, unit_spans


@dataclass(frozen=True, slots=True)
class Footprint:
    """Size of some units on a device: their tokens, or, padded, one row per path as long as the longest."""

    tokens: int = 0
    paths: int = 0
    longest: int = 0

    def __add__(self, other: Footprint) -> Footprint:
        return Footprint(self.tokens + other.tokens, self.paths + other.paths, max(self.longest, other.longest))

    def size(self, padded: bool) -> int:
        """Their number."""
        return self.paths * self.longest if padded else self.tokens


def footprints(batch: Batch) -> list[Footprint]:
    """What each unit takes up."""
    before = prefixes(batch)
    ends = torch.cumsum(batch.structure.rows["lengths"], 0)
    whole = (batch.structure.tokens["positions"][ends - 1] + 1).tolist()  # of each row with what it continues
    shared = set(before.tolist())
    return [
        Footprint(size, sum(row not in shared for row in range(first, last)), max(whole[first:last]))
        for first, last, size in unit_spans(batch)
    ]


def micro_batch_ranges(taken: Sequence[Footprint], budget: int, *, padded: bool) -> list[range]:
    """Ranges of units that take at most `budget` token slots each; a larger unit is alone in its range."""
    runs, start, filled = list[range](), 0, Footprint()
    for unit, more in enumerate(taken):
        if unit > start and (filled + more).size(padded) > budget:
            runs.append(range(start, unit))
            start, filled = unit, Footprint()
        filled = filled + more
    return [*runs, range(start, len(taken))] if taken else []


def micro_batches(batch: Batch, max_tokens: int, *, padded: bool = False) -> Iterator[Batch]:
    """Cut between units so that each piece takes at most `max_tokens` token slots; a larger unit is alone.

    A slot is a token or, for a model that runs padded, also padding up to the longest row.
    """
    spans = unit_spans(batch)
    taken = footprints(batch) if padded else [Footprint(size) for *_, size in spans]
    for run in micro_batch_ranges(taken, max_tokens, padded=padded):
        yield batch.slice_rows(spans[run[0]][0], spans[run[-1]][1])


def split_rows(batch: Batch, parts: int) -> list[Batch]:
    """Cut a batch of units into `parts` runs of consecutive units whose counts differ by at most one."""
    spans = unit_spans(batch)
    edges = [len(spans) * i // parts for i in range(parts + 1)]
    return [batch.slice_rows(spans[a][0], spans[b - 1][1]) for a, b in pairwise(edges) if a < b]
