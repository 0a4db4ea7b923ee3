"""Trees of rows: layout, splitting, paths, and the selection of units."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runner.core.batch import pack, row_of_tokens, row_sum, select_units, unit_spans
from runner.core.micro_batches import micro_batches
from runner.core.prefix_tree import Branch, Tree, pack_trees, paths

tokens = st.lists(st.integers(0, 99), min_size=1, max_size=6)
trees = st.lists(
    st.builds(lambda p, bs: tree(p, bs), tokens, st.lists(tokens, min_size=1, max_size=4)), min_size=1, max_size=5
)


def tree(prompt: list[int], branches: list[list[int]]) -> Tree:
    return Tree(prompt, [Branch(b, {"weight": [1.0] * len(b)}, {"reward": float(i)}) for i, b in enumerate(branches)])


def sequences(batch_of: list[Tree]) -> list[list[int]]:
    return [[*t.prompt, *b.ids] for t in batch_of for b in t.branches]


def test_a_shared_prompt_is_a_row_that_its_branches_continue() -> None:
    batch = pack_trees([tree([1, 2], [[3], [4, 5]]), tree([6], [[7]])])
    assert batch.tokens["ids"].tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert batch.tokens["positions"].tolist() == [0, 1, 2, 2, 3, 0, 1]
    assert batch.tokens["parent"].tolist() == [-1, 0, 1, 1, 3, -1, 5]
    assert batch.tokens["weight"].tolist() == [0, 0, 1, 1, 1, 0, 1]
    assert batch.rows["branch"].tolist() == [-1, 0, 1, -1, 0]
    assert batch.rows["tree"].tolist() == [0, 0, 0, 1, 1]
    assert batch.rows["unit"].tolist() == [0, 0, 0, 1, 1]
    assert batch.rows["reward"].tolist() == [0, 0, 1, 0, 0]
    assert batch.count() == {"tokens": 4, "rows": 3, "units": 2}, "a prompt learns nothing and is no row of its own"


def test_without_sharing_every_branch_repeats_the_prompt() -> None:
    batch = pack_trees([tree([1, 2], [[3], [4, 5]])], share=False)
    assert batch.tokens["ids"].tolist() == [1, 2, 3, 1, 2, 4, 5]
    assert batch.tokens["parent"].tolist() == [-1, 0, 1, -1, 3, 4, 5]
    assert batch.tokens["weight"].tolist() == [0, 0, 1, 0, 0, 1, 1]
    assert batch.count() == {"tokens": 3, "rows": 2, "units": 1} and paths(batch) is None


def test_branches_of_an_empty_prompt_are_rows_of_their_own() -> None:
    batch = pack_trees([tree([], [[3, 4], [5]]), tree([1], [[2]])])
    assert batch.tokens["ids"].tolist() == [3, 4, 5, 1, 2] and batch.tokens["parent"].tolist() == [-1, 0, -1, -1, 3]
    assert batch.rows["branch"].tolist() == [0, 1, -1, 0] and batch.rows["unit"].tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("bad", [[], [Tree([1], [])], [Tree([1], [Branch([])])]])
def test_nothing_empty_is_packed(bad: list[Tree]) -> None:
    with pytest.raises(ValueError, match="at least one"):
        pack_trees(bad)


def test_a_channel_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="channel weight has 2 values for 1 tokens"):
        pack_trees([Tree([1], [Branch([2], {"weight": [1.0, 1.0]})])])


@given(trees, st.booleans(), st.integers(1, 20))
def test_a_large_tree_is_split_by_repeating_its_prompt(given_trees: list[Tree], share: bool, most: int) -> None:
    batch = pack_trees(given_trees, share=share, most_tokens=most)
    for first, last, size in unit_spans(batch):
        branches = int((batch.rows["branch"][first:last] >= 0).sum())
        assert size <= most or branches == 1
    assert path_ids(batch) == sequences(given_trees)


def path_ids(batch: object) -> list[list[int]]:
    found = paths(batch)  # type: ignore[arg-type]
    ids = batch.tokens["ids"]  # type: ignore[attr-defined]
    if found is None:
        return [part.tolist() for part in ids.split(batch.rows["lengths"].tolist())]  # type: ignore[attr-defined]
    return [part.tolist() for part in ids[found.index].split(list(found.lengths))]


@given(trees)
def test_paths_are_the_whole_sequences_and_reach_every_token(given_trees: list[Tree]) -> None:
    batch = pack_trees(given_trees)
    found = paths(batch)
    assert found is not None and path_ids(batch) == sequences(given_trees)
    assert torch.equal(found.index[found.inverse], torch.arange(batch.num_tokens))


@given(trees, st.integers(1, 30))
def test_micro_batches_hold_whole_trees(given_trees: list[Tree], budget: int) -> None:
    batch = pack_trees(given_trees)
    found = [ids for piece in micro_batches(batch, budget) for ids in path_ids(piece)]
    assert sorted(found) == sorted(sequences(given_trees))


@given(trees, st.randoms(use_true_random=False))
def test_units_can_be_taken_in_any_order_and_joined_again(given_trees: list[Tree], random: object) -> None:
    batch = pack_trees(given_trees)
    order = list(range(len(given_trees)))
    random.shuffle(order)  # type: ignore[attr-defined]
    chosen = select_units(batch, order)
    assert path_ids(chosen) == sequences([given_trees[i] for i in order])
    assert chosen.rows["unit"].tolist() == sorted(chosen.rows["unit"].tolist())
    back = select_units(chosen, [order.index(i) for i in range(len(order))])
    assert all(torch.equal(back.tokens[name], batch.tokens[name]) for name in batch.tokens)
    assert all(torch.equal(back.rows[name], batch.rows[name]) for name in batch.rows)


def test_sums_over_rows_are_differentiable() -> None:
    batch = pack([[1, 2], [3], [4, 5, 6]], [[1.0] * 2, [1.0], [1.0] * 3])
    values = torch.arange(6.0, requires_grad=True)
    sums = row_sum(batch, values)
    assert sums.tolist() == [1, 2, 12] and row_of_tokens(batch).tolist() == [0, 0, 1, 2, 2, 2]
    (sums * torch.tensor([1.0, 10.0, 100.0])).sum().backward()  # type: ignore[no-untyped-call]
    assert values.grad is not None and values.grad.tolist() == [1, 1, 10, 100, 100, 100]


@given(trees, st.integers(1, 60))
def test_padded_micro_batches_bound_paths_times_the_longest(given_trees: list[Tree], budget: int) -> None:
    for piece in micro_batches(pack_trees(given_trees), budget, padded=True):
        found = paths(piece)
        assert found is not None
        units = len(unit_spans(piece))
        assert len(found.lengths) * max(found.lengths) <= budget or units == 1
