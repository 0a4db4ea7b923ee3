"""The ranks of a job as a grid, and which of them belong together.

rank = (((pp · R + dp_replicate) · S + dp_shard) · C + cp) · T + tp      the last dimension's ranks are neighbours
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import NamedTuple

DATA = ("dp_replicate", "dp_shard")  # the dimensions between whose ranks the work is dealt out
COPIES = (*DATA, "cp")  # those whose ranks find parts of the same weights' gradients
Family = tuple[int, ...]  # ranks that belong together, in order


class Mesh(NamedTuple):
    """How many ranks there are in each dimension.

    pp: runs of layers; dp_replicate: copies of the model; dp_shard: parts of each copy; cp: runs of each row's tokens;
    tp: slices of each layer; ep: over how many of the ranks of the middle three a layer's experts lie, which is no
    dimension of its own
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def dims(self) -> dict[str, int]:
        """The dimensions by name, outermost first; their product is the number of ranks."""
        return {name: size for name, size in self._asdict().items() if name != "ep"}

    @property
    def world(self) -> int:
        """All ranks."""
        return prod(self.dims.values())

    @property
    def data(self) -> int:
        """Between how many ranks the work is dealt out: those that differ otherwise do the same work together."""
        return self.dp_replicate * self.dp_shard

    @property
    def pieces(self) -> int:
        """In how many pieces a sharded copy's weights lie: cp ranks hold some, too."""
        return self.dp_shard * self.cp

    @property
    def parts(self) -> int:
        """In how many parts of its own kind a model's structure lies: more than one makes another module of it."""
        return self.pp * self.tp * self.ep

    @property
    def copies(self) -> int:
        """How many ranks find parts of the same weights' gradients."""
        return self.data * self.cp

    def families(self, *names: str) -> list[Family]:
        """All sets of ranks that differ in the dimensions of these names only; in each, in the order of the ranks."""
        free = [range(size) if name in names else [0] for name, size in self.dims.items()]
        bound = [[0] if name in names else range(size) for name, size in self.dims.items()]
        offsets = [self._rank(place) for place in product(*free)]
        return [tuple(self._rank(place) + offset for offset in offsets) for place in product(*bound)]

    def experts(self) -> list[Family]:
        """All sets of ranks over which a layer's experts lie."""
        return [copies[at : at + self.ep] for copies in self.families(*COPIES) for at in range(0, len(copies), self.ep)]

    def expert_copies(self) -> list[Family]:
        """All sets of ranks that hold the same experts."""
        return [copies[at :: self.ep] for copies in self.families(*COPIES) for at in range(self.ep)]

    @property
    def expert_grid(self) -> dict[str, int]:
        """How the ranks of `copies` stand to a layer's experts, outermost first: copies of them, if a copy of the model
        is in pieces, pieces of each expert (`dp_shard`), and the ranks over which they lie."""
        copies = {"dp_replicate": self.dp_replicate} if self.dp_shard > 1 < self.dp_replicate else {}
        return {**copies, "dp_shard": self.copies // prod(copies.values()) // self.ep, "ep": self.ep}

    def expert_pieces(self) -> list[Family]:
        """All sets of ranks that hold pieces of the same experts."""
        size = self.expert_grid["dp_shard"]
        return [held[at : at + size] for held in self.expert_copies() for at in range(0, len(held), size)]

    def _rank(self, place: Sequence[int]) -> int:
        rank = 0
        for at, size in zip(place, self.dims.values(), strict=True):
            rank = rank * size + at
        return rank

    def __str__(self) -> str:
        said = [f"{name}={size}" for name, size in self._asdict().items() if size > 1]
        return " × ".join(said) or "one process"


def family(families: Sequence[Family], rank: int) -> Family:
    """The one that `rank` is in."""
    return next(one for one in families if rank in one)
