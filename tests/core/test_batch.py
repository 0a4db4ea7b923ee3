"""Ragged batches: layout, cutting by budget, and what a cut keeps."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runner.core.batch import Batch, pack, split_rows, unit_spans
from runner.core.media import MEDIA_ID
from runner.core.micro_batches import PATCHES_PER_PLACE, Footprints, micro_batches, pack_units

rows = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=12), min_size=1, max_size=10)


def packed(ids: list[list[int]]) -> Batch:
    return pack(ids, [[1.0] * len(row) for row in ids])


def test_pack_lays_rows_end_to_end() -> None:
    batch = pack([[5, 6, 7], [8, 9]], [[1.0, 0.0, 1.0], [1.0, 1.0]])
    assert batch.tokens["ids"].tolist() == [5, 6, 7, 8, 9]
    assert batch.tokens["positions"].tolist() == [0, 1, 2, 0, 1]
    assert batch.tokens["parent"].tolist() == [-1, 0, 1, -1, 3]
    assert batch.tokens["weight"].tolist() == [0, 0, 1, 0, 1], "a row's first token is predicted by nothing"
    assert batch.count() == {"tokens": 2, "rows": 2, "units": 2}


def test_an_empty_row_and_a_missing_weight_are_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        pack([[1], []], [[1.0], []])
    for weights in ([[1.0], [1.0]], [[1.0, 1.0], [1.0, 1.0]], [[1.0, 1.0]]):
        with pytest.raises(ValueError, match="every token needs a weight"):
            pack([[1, 2], [3]], weights)


def rows_of(piece: Batch) -> list[list[int]]:
    return [part.tolist() for part in torch.split(piece.tokens["ids"], piece.rows["lengths"].tolist())]


@given(rows, st.integers(1, 40), st.booleans())
def test_micro_batches_keep_every_row_whole(ids: list[list[int]], budget: int, padded: bool) -> None:
    ids = [[100 * at + one for one in row] for at, row in enumerate(ids)]
    pieces = list(micro_batches(packed(ids), budget, padded=padded))
    assert sorted(row for piece in pieces for row in rows_of(piece)) == ids
    for piece in pieces:
        assert rows_of(piece) == sorted(rows_of(piece)), "rows of a micro-batch keep their order"
        assert piece.num_tokens <= budget or piece.num_rows == 1
        reference = packed(rows_of(piece))
        assert torch.equal(piece.tokens["parent"], reference.tokens["parent"]), "parents must point into the piece"


@given(rows, st.integers(1, 40))
def test_no_two_micro_batches_fit_into_one(ids: list[list[int]], budget: int) -> None:
    sizes = [piece.num_tokens for piece in micro_batches(packed(ids), budget)]
    assert all(a + b > budget for a, b in combinations(sizes, 2))


@given(st.lists(st.integers(1, 60), min_size=1, max_size=30), st.integers(1, 80))
def test_each_unit_is_put_where_it_leaves_the_least_room(sizes: list[int], budget: int) -> None:
    found, rooms = pack_units(Footprints(np.array(sizes), np.zeros(len(sizes), np.int64)), budget), list[list[int]]()
    for unit in sorted(range(len(sizes)), key=lambda unit: (-sizes[unit], unit)):
        room = {at: budget - sum(sizes[one] for one in micro) - sizes[unit] for at, micro in enumerate(rooms)}
        fits = [(left, at) for at, left in room.items() if left >= 0]
        rooms[min(fits)[1]].append(unit) if fits else rooms.append([unit])
    assert found == sorted(map(sorted, rooms))


def test_best_fit_needs_fewer_micro_batches_than_the_order_of_the_data() -> None:
    assert [piece.num_tokens for piece in micro_batches(packed([[1] * n for n in (6, 5, 4, 5)]), 10)] == [10, 10]


def test_a_unit_is_never_cut() -> None:
    batch = packed([[1, 2], [3, 4], [5], [6]])
    batch.rows["unit"][:] = torch.tensor([0, 0, 1, 1])  # type: ignore[index]
    assert unit_spans(batch).tolist() == [[0, 2, 4], [2, 4, 2]]
    assert [piece.num_rows for piece in micro_batches(batch, 3)] == [2, 2]


@given(rows, st.integers(1, 5))
def test_split_rows_shares_units_evenly(ids: list[list[int]], parts: int) -> None:
    pieces = split_rows(packed(ids), parts)
    sizes = [piece.num_rows for piece in pieces]
    assert sum(sizes) == len(ids) and len(pieces) == min(parts, len(ids))
    assert max(sizes) - min(sizes) <= 1


@given(rows, st.integers(1, 60))
def test_padded_micro_batches_bound_rows_times_the_longest(ids: list[list[int]], budget: int) -> None:
    sizes = [piece.rows["lengths"].tolist() for piece in micro_batches(packed(ids), budget, padded=True)]
    assert sorted(n for piece in sizes for n in piece) == sorted(map(len, ids))
    assert all(len(piece) * max(piece) <= budget or len(piece) == 1 for piece in sizes)
    by_length = sorted(sizes, key=max, reverse=True)
    assert [n for piece in by_length for n in sorted(piece)[::-1]] == sorted(map(len, ids), reverse=True)


@pytest.mark.parametrize("padded", [False, True])
def test_patches_of_images_count_in_a_micro_batch(padded: bool) -> None:
    image = [MEDIA_ID + 7] * 5
    batch = pack([[1] * 10, [1, *image, 2, 3, 4, 5]], [[1.0] * 10] * 2)
    room = 20 + 5 * PATCHES_PER_PLACE

    def sizes(budget: int) -> list[int]:
        return [micro.num_rows for micro in micro_batches(batch, budget, padded=padded)]

    assert sizes(20) == [1, 1] and sizes(room - 1) == [1, 1] and sizes(room) == [2]


def test_a_moved_batch_remembers_how_it_lies() -> None:
    batch, device = packed([[1, 2], [3]]), torch.device("meta")
    there = batch.to(device)
    assert there.tokens["ids"].device == device and there.structure is batch
    assert there.to(device).structure is batch, "moved again"
    assert there.slice_rows(1, 2).structure.tokens["ids"].tolist() == [3], "a part is not the whole"
    assert [piece.num_tokens for piece in micro_batches(there, 2)] == [2, 1]
    assert batch.to(torch.device("cpu")).host is None and batch.structure is batch
