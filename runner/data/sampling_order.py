"""Which item stands at which position of the endless order: pure functions of (seed, position).

    position ──▶ epoch and place in it ──permutation(seed, epoch)──▶ item             one source, or several by size
    position ──▶ block and slot in it  ──pattern(seed, block)──▶ source and its n-th visit ──▶ item      weighted
    round    ──▶ seed of an order of its own, by which a step that needs more items is refilled

Nothing is stored and no call depends on another, so that a resumed run continues the very same items.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from runner.core.errors import DataError
from runner.core.rng import derive_seed

BLOCK = 1000  # positions after which a mixture has given each source exactly its share


class ItemOrder(Protocol):
    """An endless order of items."""

    # (source, item of the source) at each of some positions, int64 [n, 2]
    def items_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]: ...


class RefillOrders:
    """The order of each round, computed on first use.

    Round 0 follows `shuffle`; the others have seeds of their own and are always shuffled, or a refill would
    repeat what it adds to.
    """

    def __init__(self, make: Callable[[int, bool], ItemOrder], seed: int, shuffle: bool) -> None:
        self._first = make(seed, shuffle)
        self._refill = lru_cache(maxsize=8)(lambda round: make(derive_seed(seed, "refill", round), True))

    def take(self, step: int, count: int, round: int = 0) -> NDArray[np.int64]:
        """(source, item of it), int64 [count, 2], at the positions step·count … of the round's order."""
        return take_items(self._refill(round) if round else self._first, step, count)


def take_items(order: ItemOrder, step: int, count: int) -> NDArray[np.int64]:
    """(source, item of it), int64 [count, 2], at `count` positions from step·count."""
    return order.items_at(np.arange(step * count, (step + 1) * count))


def random_stream(*key: int | str) -> np.random.PCG64:
    """A random stream of its own for each key: PCG64 seeded with the key's sha256."""
    return np.random.PCG64(int.from_bytes(hashlib.sha256(json.dumps(key).encode()).digest(), "big"))


def permutation(size: int, *key: int | str) -> NDArray[np.int64]:
    """A permutation of 0 … size − 1 for each key, int64 [size].

    Made by sorting the raw stream, which numpy keeps the same for ever; `Generator.permutation` it may change.
    """
    found = np.argsort(random_stream(*key).random_raw(size), kind="stable")
    found.setflags(write=False)
    return found


def apportion(weights: Sequence[float], total: int) -> list[int]:
    """`total` parts given out by weight with the largest remainders: whole numbers whose sum is `total`."""
    exact = [weight * total / sum(weights) for weight in weights]
    counts = [int(x) for x in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], i))
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts


class ShuffledEpochs:
    """Visits each of `size` items once per epoch; the newest permutations are cached."""

    def __init__(self, size: int, shuffle: bool, seed: int, name: int | str) -> None:
        self._size, self._shuffle = size, shuffle
        self._permutation = lru_cache(maxsize=2)(lambda epoch: permutation(size, seed, epoch, "order", name))

    def items(self, visits: NDArray[np.int64]) -> NDArray[np.int64]:
        """The items of some visits, by their numbers."""
        epochs, items = np.divmod(visits, self._size)
        for epoch in np.unique(epochs).tolist() if self._shuffle else ():
            here = epochs == epoch
            items[here] = self._permutation(epoch)[items[here]]
        return items


class ProportionalOrder:
    """All items of all sources once in every epoch, in a new order each time, or as they stand."""

    def __init__(self, sizes: Sequence[int], seed: int, shuffle: bool) -> None:
        self._ends = np.cumsum(sizes)
        self._first = self._ends - sizes  # item of each source
        self._epochs = ShuffledEpochs(sum(sizes), shuffle, seed, "all")

    def items_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `ItemOrder`."""
        items = self._epochs.items(positions)
        sources = np.searchsorted(self._ends, items, side="right")
        return np.stack([sources, items - self._first[sources]], 1)


class WeightedMixture:
    """Sources by weight: exact shares in every block of 1000 positions; each source has epochs of its own.

    Raises DataError for a weight too small to get one position in a block.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int, shuffle: bool) -> None:
        self._counts = apportion(weights, BLOCK)
        if not min(self._counts):
            raise DataError(
                f"data.mixture_weights={list(weights)}: a weight below 1 in {BLOCK} is never sampled; raise it, or "
                "leave the source out"
            )
        self._epochs = [ShuffledEpochs(size, shuffle, seed, source) for source, size in enumerate(sizes)]
        even = interleave_sources(self._counts)
        self._block = lru_cache(maxsize=2)(
            lambda block: _visits(even[permutation(BLOCK, seed, block, "mixture")] if shuffle else even)
        )

    def items_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `ItemOrder`."""
        blocks, slots = np.divmod(positions, BLOCK)
        found = np.empty((len(positions), 2), np.int64)
        for block in np.unique(blocks).tolist():
            found[blocks == block] = self._block(block)[slots[blocks == block]]
        for source, epochs in enumerate(self._epochs):
            here = found[:, 0] == source
            found[here, 1] = epochs.items(blocks[here] * self._counts[source] + found[here, 1])
        return found


def interleave_sources(counts: Sequence[int]) -> NDArray[np.int64]:
    """The sources of one block, `counts[source]` times each, evenly spread; int64 [sum of counts]."""
    slots = sorted(((i + 0.5) / count, source) for source, count in enumerate(counts) for i in range(count))
    return np.array([source for _, source in slots], dtype=np.int64)


def _visits(sources: NDArray[np.int64]) -> NDArray[np.int64]:
    """(source, how often it stood in the block before) for each slot, int64 [slots, 2]."""
    before = np.empty_like(sources)
    for source in np.unique(sources):
        before[sources == source] = np.arange((sources == source).sum())
    return np.stack([sources, before], 1)
