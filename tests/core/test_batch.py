"""Ragged batches: layout, cutting by budget, and what a cut keeps."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runner.core.batch import PATCHES_PER_PLACE, Batch, micro_batches, pack, split_rows, unit_spans
from runner.core.media import MEDIA_ID

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


@given(rows, st.integers(1, 40))
def test_micro_batches_keep_every_row_whole_and_in_order(ids: list[list[int]], budget: int) -> None:
    pieces = list(micro_batches(packed(ids), budget))
    seen = [
        part.tolist() for piece in pieces for part in torch.split(piece.tokens["ids"], piece.rows["lengths"].tolist())
    ]
    assert seen == ids
    for piece in pieces:
        assert piece.num_tokens <= budget or piece.num_rows == 1
        reference = packed([p.tolist() for p in torch.split(piece.tokens["ids"], piece.rows["lengths"].tolist())])
        assert torch.equal(piece.tokens["parent"], reference.tokens["parent"]), "parents must point into the piece"


@given(rows, st.integers(1, 40))
def test_micro_batches_are_as_full_as_the_budget_allows(ids: list[list[int]], budget: int) -> None:
    pieces = list(micro_batches(packed(ids), budget))
    for left, right in pairwise(pieces):
        assert left.num_tokens + int(right.rows["lengths"][0]) > budget


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
    assert [n for piece in sizes for n in piece] == [len(row) for row in ids]
    assert all(len(piece) * max(piece) <= budget or len(piece) == 1 for piece in sizes)
    for left, right in pairwise(sizes):
        assert (len(left) + 1) * max([*left, right[0]]) > budget, "the next row would have fitted"


@pytest.mark.parametrize("padded", [False, True])
def test_patches_of_images_count_in_a_micro_batch(padded: bool) -> None:
    image = [MEDIA_ID + 7] * 5
    rows = [[1] * 10, [1, *image, 2, 3, 4, 5], [1] * 10, [1] * 10]
    batch = pack(rows, [[1.0] * 10] * 4)
    room = 20 + 5 * PATCHES_PER_PLACE

    def sizes(budget: int) -> list[int]:
        return [micro.num_rows for micro in micro_batches(batch, budget, padded=padded)]

    assert sizes(20) == [1, 1, 2] and sizes(room - 1) == [1, 1, 2] and sizes(room) == [2, 2]


def test_a_moved_batch_remembers_how_it_lies() -> None:
    batch, device = packed([[1, 2], [3]]), torch.device("meta")
    there = batch.to(device)
    assert there.tokens["ids"].device == device and there.structure is batch
    assert there.to(device).structure is batch, "moved again"
    assert there.slice_rows(1, 2).structure.tokens["ids"].tolist() == [3], "a part is not the whole"
    assert [piece.num_tokens for piece in micro_batches(there, 2)] == [2, 1]
    assert batch.to(torch.device("cpu")).host is None and batch.structure is batch
