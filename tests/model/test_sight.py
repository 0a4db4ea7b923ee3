"""What ranks that share a batch's tokens see of one another: all that a mask says, and each of it once."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from runner.core.batch import Batch, prefixes, row_of_tokens
from runner.core.prefix_tree import Branch, Tree, pack_trees
from runner.model import ring_attention
from runner.model.context_parallel import token_assignment

SIZES = st.integers(1, 12)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Prompts, some of them shared by several answers."""
    prompts = draw(st.lists(st.tuples(SIZES, st.lists(SIZES, min_size=1, max_size=3)), min_size=1, max_size=4))
    trees = [Tree([1] * prompt, [Branch([2] * answer) for answer in answers]) for prompt, answers in prompts]
    return pack_trees(trees, share=draw(st.booleans()))


def mask(batch: Batch, window: int | None) -> Tensor:
    """Which token sees which by definition: those before it on its way to the root, bool [T, T]."""
    row, positions, before = row_of_tokens(batch), batch.tokens["positions"], prefixes(batch)
    behind = positions[:, None] - positions
    there = (row[:, None] == row) | (before[row][:, None] == row)
    return there & (behind >= 0) & (behind < (window or batch.num_tokens))


@given(batch=batches(), ranks=st.integers(1, 5), window=st.none() | st.integers(1, 9), tile=st.integers(1, 7))
@settings(max_examples=150, deadline=None)
def test_every_pair_that_is_seen_is_met_once(batch: Batch, ranks: int, window: int | None, tile: int) -> None:
    places, real = token_assignment(batch.num_tokens, ranks)
    wanted, found = mask(batch, window), torch.zeros(batch.num_tokens, batch.num_tokens, dtype=torch.int64)
    seen = ring_attention.CpMask(batch, places, real)
    before, ring_attention.QUERIES, ring_attention.KEYS = (ring_attention.QUERIES, ring_attention.KEYS), tile, tile + 1
    try:
        visits = [seen.transfers(rank, window) for rank in range(ranks)]
    finally:
        ring_attention.QUERIES, ring_attention.KEYS = before
    for rank in range(ranks):
        own = seen.visible_ranges(rank, window)
        for step, visit in enumerate(visits[rank]):
            giver = (rank - step) % ranks
            assert torch.equal(visit.keys, places[giver][visits[giver][step].sent])
            for one in visit.tiles:
                met = own.select(one.queries).is_visible(visit.keys[one.keys])
                assert one.is_masked or bool(met.all())
                there = real[rank][one.queries]
                rows, columns = places[rank][one.queries][there], visit.keys[one.keys]
                found[rows[:, None], columns] += met[there].long()
    assert torch.equal(found, wanted.long())


@given(tokens=st.integers(1, 200), ranks=st.integers(1, 6))
def test_every_token_is_held_once_and_no_rank_has_more_than_another(tokens: int, ranks: int) -> None:
    places, real = token_assignment(tokens, ranks)
    assert torch.equal(places[real].sort().values, torch.arange(tokens))
    assert places.shape[1] <= -(-tokens // ranks) + 2 and places[~real].eq(tokens - 1).all()
    assert (places.diff() >= 0).all()


@given(rows=st.integers(2, 30), ranks=st.integers(2, 4))
def test_of_rows_within_a_rank_no_key_travels(rows: int, ranks: int) -> None:
    batch = pack_trees([Tree([1] * rows, [Branch([1] * rows)]) for _ in range(2 * ranks)], share=False)
    places, real = token_assignment(batch.num_tokens, ranks)
    seen = ring_attention.CpMask(batch, places, real)
    assert all(len(visit.keys) == 0 for rank in range(ranks) for visit in seen.transfers(rank, None)[1:])
