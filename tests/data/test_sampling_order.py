"""The order is a pure function of seed and position; shares are exact."""

from __future__ import annotations

import math
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.core.errors import DataError
from runner.data.sampling_order import (
    BLOCK,
    ItemOrder,
    ProportionalOrder,
    RefillOrders,
    WeightedMixture,
    apportion,
    interleave_sources,
    permutation,
    take_items,
)

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=4)
WEIGHTS = st.lists(st.floats(0.01, 10), min_size=1, max_size=5)


def spots_of(order: ItemOrder, step: int, count: int) -> list[tuple[int, ...]]:
    return list(map(tuple, take_items(order, step, count).tolist()))


@given(SIZES, st.integers(0, 2**63 - 1), st.booleans())
def test_each_epoch_holds_every_item_once(sizes: list[int], seed: int, shuffle: bool) -> None:
    order, total = ProportionalOrder(sizes, seed, shuffle), sum(sizes)
    everything = [(source, item) for source, size in enumerate(sizes) for item in range(size)]
    for epoch in range(3):
        spots = spots_of(order, epoch, total)
        assert sorted(spots) == everything
        if not shuffle:
            assert spots == everything


@given(st.integers(0, 2**63 - 1), st.lists(st.integers(0, 5000), min_size=1, max_size=30), st.booleans())
def test_the_same_spot_whatever_was_asked_before(seed: int, positions: list[int], mixture: bool) -> None:
    def new() -> ItemOrder:
        return (
            WeightedMixture([7, 30, 11], [1, 2, 3], seed, True)
            if mixture
            else ProportionalOrder([7, 30, 11], seed, True)
        )

    one = new()
    shuffled = random.Random(0).sample(positions, len(positions))
    for order in (positions, shuffled):
        alone = [new().items_at(np.array([position]))[0].tolist() for position in order]
        assert one.items_at(np.array(order)).tolist() == alone


def test_steps_join_whatever_their_size() -> None:
    order = ProportionalOrder([10], 3, True)
    assert [s for step in range(6) for s in spots_of(order, step, 4)] == [
        s for step in range(3) for s in spots_of(order, step, 8)
    ]


def test_epochs_and_seeds_differ() -> None:
    epochs = [tuple(spots_of(ProportionalOrder([50], seed, True), epoch, 50)) for seed in (0, 1) for epoch in (0, 1)]
    assert len(set(epochs)) == 4


def test_permutations_are_uniform() -> None:
    """Chi-square over the 24 orders of 4 items, 0.999 quantile of 23 degrees of freedom."""
    counts = Counter(tuple(permutation(4, seed, "test").tolist()) for seed in range(4800))
    assert sum((counts[p] - 200) ** 2 / 200 for p in counts) < 49.7
    assert len(counts) == math.factorial(4)


def test_the_stream_is_the_same_for_ever() -> None:
    """Runs that were begun with an older version must continue the same items."""
    assert permutation(8, 0, 0, "order", "all").tolist() == [7, 1, 3, 6, 5, 0, 4, 2]
    assert np.bincount(permutation(1000, 1, "x")).tolist() == [1] * 1000


@given(WEIGHTS, st.integers(1, 2000))
def test_shares_add_up_and_are_off_by_less_than_one(weights: list[float], total: int) -> None:
    counts = apportion(weights, total)
    assert sum(counts) == total
    assert all(abs(c - w * total / sum(weights)) < 1 for c, w in zip(counts, weights, strict=True))


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_block_of_a_mixture_has_the_exact_shares(shuffle: bool) -> None:
    order = WeightedMixture([13, 500, 7], [0.7, 0.25, 0.05], 5, shuffle)
    visits: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for block in range(3):
        spots = spots_of(order, block, BLOCK)
        assert Counter(source for source, _ in spots) == {0: 700, 1: 250, 2: 50}
        for source, item in spots:
            visits[source].append(item)
    for source, size in enumerate((13, 500, 7)):  # each source has epochs of its own, across blocks
        for start in range(0, len(visits[source]) - size, size):
            assert sorted(visits[source][start : start + size]) == list(range(size))
        if not shuffle:
            assert visits[source] == [i % size for i in range(len(visits[source]))]


def test_blocks_of_a_mixture_differ() -> None:
    order = WeightedMixture([100, 100], [1, 1], 5, True)
    first, second = ([source for source, _ in spots_of(order, block, BLOCK)] for block in (0, 1))
    assert first != second


@given(st.lists(st.integers(1, 50), min_size=1, max_size=4))
def test_without_shuffling_a_mixture_is_even(counts: list[int]) -> None:
    sources = interleave_sources(counts).tolist()
    total = len(sources)
    for source, count in enumerate(counts):
        seen = 0
        for slot, found in enumerate(sources, 1):
            seen += found == source
            assert abs(seen - slot * count / total) <= len(counts)
        assert seen == count


def test_a_weight_too_small_to_be_drawn_is_an_error() -> None:
    with pytest.raises(DataError, match=r"data\.mixture_weights=\[1, 0\.0001\]: a weight below 1 in 1000"):
        WeightedMixture([5, 5], [1, 0.0001], 0, True)


def rounds(seed: int, shuffle: bool) -> RefillOrders:
    return RefillOrders(lambda seed, shuffle: ProportionalOrder([7, 30, 11], seed, shuffle), seed, shuffle)


ASKED = st.lists(st.tuples(st.integers(0, 400), st.integers(1, 60), st.integers(0, 12)), min_size=1, max_size=12)


@given(st.integers(0, 2**63 - 1), st.booleans(), ASKED)
def test_a_round_is_a_pure_function_of_its_arguments(
    seed: int, shuffle: bool, asked: list[tuple[int, int, int]]
) -> None:
    one = rounds(seed, shuffle)
    found = [one.take(*a).tolist() for a in asked]
    assert found == [rounds(seed, shuffle).take(*a).tolist() for a in asked]
    assert [one.take(*a).tolist() for a in reversed(asked)] == found[::-1]


@given(st.integers(0, 2**63 - 1), st.integers(1, 5))
def test_each_round_is_an_order_of_its_own_over_all_items(seed: int, round: int) -> None:
    found = rounds(seed, True)
    assert np.array_equal(found.take(3, 4), take_items(ProportionalOrder([7, 30, 11], seed, True), 3, 4))
    first, *others = (found.take(0, 48, r).tolist() for r in (0, round, round + 1))
    assert sorted(others[0]) == sorted(first)
    assert len({str(one) for one in (first, *others)}) == 3


def test_a_refill_is_shuffled_also_where_the_items_come_as_in_the_file() -> None:
    found = rounds(0, False)
    assert found.take(0, 4).tolist() == [[0, 0], [0, 1], [0, 2], [0, 3]]
    assert not np.array_equal(found.take(0, 48, 1), found.take(0, 48))
