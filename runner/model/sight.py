"""What the tokens of some ranks see of those of others, found on the CPU from how a batch is laid out.

Every token sees two runs of neighbouring places: of its own row up to itself, and of a row that it continues. With a
window both begin later. So which keys a rank has to be given, and which products of queries and keys it can leave out,
is a matter of comparing numbers, and all ranks know it of one another.

Legend: N rows, T tokens, C ranks, W tokens of each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from runner.batch import Batch, prefixes, row_of_tokens

QUERIES, KEYS = 512, 1024  # at most, of one product


@dataclass(frozen=True, slots=True)
class Seen:
    """The places that each of some tokens sees: from `first` up to and with `own`, and from `early` to before `end`."""

    first: Tensor  # int64, as are the others
    own: Tensor
    early: Tensor
    end: Tensor

    def of(self, places: Tensor | slice) -> Seen:
        """Of some of the tokens."""
        return Seen(self.first[places], self.own[places], self.early[places], self.end[places])

    def to(self, device: torch.device) -> Seen:
        """The same on a device."""
        channels = (self.first, self.own, self.early, self.end)
        return Seen(*(channel.to(device, non_blocking=True) for channel in channels))

    def sees(self, keys: Tensor) -> Tensor:
        """Whether each token sees each of the places `keys`, bool [tokens, keys]."""
        own = (keys >= self.first[:, None]) & (keys <= self.own[:, None])
        return own | ((keys >= self.early[:, None]) & (keys < self.end[:, None]))

    def all_see(self, first: Tensor, last: Tensor) -> bool:
        """Whether each token sees, in one of its two runs, every place from `first` to `last`."""
        own = (self.first.max() <= first) & (self.own.min() >= last)
        return bool(own | ((self.early.max() <= first) & (self.end.min() > last)))


@dataclass(frozen=True, slots=True)
class Tile:
    """Some queries and some keys, of which at least a few are seen; `cut`: not all by all."""

    queries: slice
    keys: slice
    cut: bool


@dataclass(frozen=True, slots=True)
class Visit:
    """A rank meets the keys of another, `step` ranks before it.

    given: int64, which of its own keys it gives in turn to the one `step` ranks behind it; keys: int64, the places of
    those that it meets; tiles: what there is to compute with them
    """

    given: Tensor
    keys: Tensor
    tiles: tuple[Tile, ...]


class Sight:
    """What the tokens of a batch see; held, real: which of them each rank has, int64 and bool [C, W]."""

    def __init__(self, structure: Batch, held: Tensor, real: Tensor) -> None:
        self._structure, self._held, self._real = structure, held, real
        self._seen: dict[int | None, Seen] = {}

    def seen(self, rank: int, window: int | None) -> Seen:
        """What each of a rank's tokens sees, its stand-ins included; window in tokens or None."""
        return self._all(window).of(self._held[rank])

    def visits(self, rank: int, window: int | None) -> list[Visit]:
        """The meetings of a rank, itself first."""
        size, own = len(self._held), self._all(window).of(self._held[rank])
        needed = [self._needed(one, window) for one in range(size)]
        found = []
        for step in range(size):
            before, behind = (rank - step) % size, (rank + step) % size
            keys = self._held[before][self._real[before] & needed[rank][self._held[before]]]
            given = (self._real[rank] & needed[behind][self._held[rank]]).nonzero()[:, 0]
            found.append(Visit(given, keys, tuple(tiles(own, keys))))
        return found

    def _all(self, window: int | None) -> Seen:
        if window not in self._seen:
            self._seen[window] = _seen(self._structure, window)
        return self._seen[window]

    def _needed(self, rank: int, window: int | None) -> Tensor:
        """Which tokens a rank's tokens see, bool [T]."""
        seen = self._all(window).of(self._held[rank])
        edges = torch.zeros(self._structure.num_tokens + 1, dtype=torch.int64)
        for first, end in ((seen.first, seen.own + 1), (seen.early, seen.end)):
            edges.index_add_(0, first, torch.ones_like(first)).index_add_(0, end, -torch.ones_like(end))
        return torch.cumsum(edges, 0)[:-1] > 0


def _seen(batch: Batch, window: int | None) -> Seen:
    lengths, row = batch.rows["lengths"], row_of_tokens(batch)
    starts, own = torch.cumsum(lengths, 0) - lengths, torch.arange(batch.num_tokens)
    before = prefixes(batch)[row]
    # a row that continues none sees an empty run, where nothing is
    early = torch.where(before < 0, 0, starts[before])
    end = torch.where(before < 0, 0, early + lengths[before])
    if window is None:
        return Seen(starts[row], own, early, end)
    first = torch.maximum(starts[row], own - window + 1)
    late = batch.tokens["positions"] - window + 1  # the first position that is seen
    return Seen(first, own, torch.minimum(early + late.clamp(min=0), end), end)


def tiles(seen: Seen, keys: Tensor) -> list[Tile]:
    """The products that queries which see so much need with the keys at these places, which ascend."""
    found = []
    for start in range(0, len(seen.own), QUERIES):
        queries = slice(start, min(start + QUERIES, len(seen.own)))
        part = seen.of(queries)
        for first, last in _runs(part, keys):
            found += [
                Tile(queries, slice(at, end), not part.all_see(keys[at], keys[end - 1]))
                for at in range(first, last, KEYS)
                for end in [min(at + KEYS, last)]
            ]
    return found


def _runs(seen: Seen, keys: Tensor) -> list[tuple[int, int]]:
    """At most two runs of the keys that hold all that is seen, and do not overlap."""
    edges = [int(seen.first.min()), int(seen.own.max()) + 1]
    if bool((some := seen.early < seen.end).any()):
        edges += [int(seen.early[some].min()), int(seen.end[some].max())]
    at = torch.searchsorted(keys, torch.tensor(edges)).tolist()
    runs = sorted(run for run in (tuple(at[:2]), tuple(at[2:])) if run and run[0] < run[1])
    if len(runs) == 2 and runs[0][1] >= runs[1][0]:
        return [(runs[0][0], max(runs[0][1], runs[1][1]))]
    return runs
