"""Dealing work out: balanced, complete, the same whatever the order; and what one rank raises, all raise."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st

from runner.algorithm.config import SftConfig
from runner.algorithm.sft import build
from runner.core.batch import Batch, pack, unit_spans
from runner.core.errors import DataError, RunnerError
from runner.core.micro_batches import micro_batches
from runner.distributed.dtensor_utils import clip_grads_with_norm_, total_norm
from runner.distributed.work_partition import (
    BatchShard,
    SingleProcess,
    balance_by_cost,
    run_on_rank0,
    run_partitioned,
    shard_batch,
)
from runner.interfaces import TokenizedExample, TokenizedExamples
from runner.parallelism.parallel_context import ParallelContext
from tests.parallelism.worlds import on_ranks


def test_the_norm_of_half_precision_is_not_of_half_precision() -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(size, generator=generator).bfloat16() for size in (1000, 3, 0, 50)]
    norm = total_norm([*gradients, torch.ones(7)])
    wanted = torch.cat([*(one.double() for one in gradients), torch.ones(7, dtype=torch.float64)]).norm()
    assert norm.dtype == torch.float32 and abs(float(norm) / float(wanted) - 1) < 1e-6


SIZES = st.lists(st.integers(1, 60), min_size=1, max_size=20)


def loads(sizes: list[int], ranks: int) -> list[int]:
    owners = balance_by_cost(sizes, ranks)
    return [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(ranks)]


@given(SIZES, st.integers(1, 7), st.randoms())
def test_loads_differ_by_the_largest_piece_at_most_in_any_order(sizes: list[int], ranks: int, random: object) -> None:
    found = loads(sizes, ranks)
    assert sum(found) == sum(sizes) and max(found) - min(found) <= max(sizes)
    mixed = list(sizes)
    random.shuffle(mixed)  # type: ignore[attr-defined]
    assert sorted(loads(mixed, ranks)) == sorted(found)


class Of(SingleProcess):
    """One of several ranks that nobody asks anything."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def shares(batch: Batch, budget: int, ranks: int, padded: bool) -> list[BatchShard]:
    return [shard_batch(batch, budget, Of(rank, ranks), padded=padded) for rank in range(ranks)]


@given(SIZES, st.integers(1, 80), st.integers(1, 5), st.booleans())
def test_every_unit_is_one_ranks_and_all_run_as_many_micro_batches(
    sizes: list[int], budget: int, ranks: int, padded: bool
) -> None:
    ids = [[100 * row + at for at in range(size)] for row, size in enumerate(sizes)]
    batch = pack(ids, [[1.0] * size for size in sizes])
    dealt = shares(batch, budget, ranks, padded)
    assert len({len(list(share)) for share in dealt}) == 1
    rows = [
        tuple(m.slice_rows(*span[:2]).tokens["ids"].tolist())
        for s in dealt
        for m in s.micro_batches
        for span in unit_spans(m).tolist()
    ]
    assert sorted(rows) == sorted(map(tuple, ids))
    for share in dealt:
        for micro in share.micro_batches:
            lengths = micro.rows["lengths"]
            taken = len(lengths) * int(lengths.max()) if padded else micro.num_tokens
            assert taken <= budget or micro.num_rows == 1
        assert share.filler.num_rows == 1 and share.filler.num_tokens == min(sizes)


@given(SIZES, st.integers(1, 80), st.integers(1, 5), st.booleans(), st.integers(1, 3))
def test_a_rank_reads_its_own_rows_alone_and_gets_what_a_read_batch_has(
    sizes: list[int], budget: int, ranks: int, padded: bool, branches: int
) -> None:
    edges = [tuple(range(1, size, -(-size // branches))) if size > branches > 1 else () for size in sizes]
    items = [
        TokenizedExample(tuple(range(100 * at, 100 * at + size)), tuple(float(i % 2) for i in range(size)), edge)
        for at, (size, edge) in enumerate(zip(sizes, edges, strict=True))
    ]
    known, seen = TokenizedExamples.of(items), list[int]()
    watched = replace(known, read=lambda units: seen.extend(units) or known.read(units))
    algorithm = build(SftConfig(), SimpleNamespace(data=None))  # type: ignore[arg-type]
    read = pack([i.ids for i in items], [i.weights for i in items], edges)
    for rank in range(ranks):
        batch, seen[:] = algorithm.experience(watched), []
        assert batch.count() == read.count()
        own, wanted = (shard_batch(one, budget, Of(rank, ranks), padded=padded) for one in (batch, read))
        assert len(own.micro_batches) == len(wanted.micro_batches) and not seen
        for one, other in zip(own.micro_batches, wanted.micro_batches, strict=True):
            assert all(torch.equal(one.tokens[name], other.tokens[name]) for name in other.tokens)
        num_own = sum(len(unit_spans(micro)) for micro in own.micro_batches)
        assert len(seen) == num_own
        for micro in own.micro_batches:
            micro.read_ahead()
        again = shard_batch(batch, budget, Of(rank, ranks), padded=padded)
        for one, other in zip(again.micro_batches, wanted.micro_batches, strict=True):
            assert all(torch.equal(one.read().tokens[name], other.tokens[name]) for name in other.tokens)
        assert len(seen) == 2 * num_own, "what was read ahead is not read again"


class Replayed(SingleProcess):
    """Answers `gather_tensors` with what each rank would have given."""

    def __init__(self, given: list[dict[str, torch.Tensor]]) -> None:
        self.given = given

    def all_gather_tensors(self, tensors: object) -> list[dict[str, torch.Tensor]]:  # type: ignore[override]
        return self.given


@given(SIZES, st.integers(1, 5))
def test_what_the_ranks_computed_comes_back_in_the_order_of_the_batch(sizes: list[int], ranks: int) -> None:
    batch = pack([[row] * size for row, size in enumerate(sizes)], [[1.0] * size for size in sizes])
    dealt = shares(batch, 50, ranks, False)
    outputs = [
        {
            "tokens": torch.cat([m.tokens["ids"].double() for m in share.micro_batches] or [torch.zeros(0).double()]),
            "rows": torch.cat([m.rows["lengths"] for m in share.micro_batches] or [torch.zeros(0).long()]),
        }
        for share in dealt
    ]
    found = dealt[0].gather_outputs(Replayed(outputs), outputs[0])
    assert torch.equal(found["tokens"], batch.tokens["ids"].double())
    assert torch.equal(found["rows"], batch.rows["lengths"])


@given(SIZES, st.integers(1, 60), st.booleans())
def test_a_single_process_has_all_micro_batches(sizes: list[int], budget: int, padded: bool) -> None:
    batch = pack([[row] * size for row, size in enumerate(sizes)], [[1.0] * size for size in sizes])
    share = shard_batch(batch, budget, SingleProcess(), padded=padded)
    wanted = [micro.tokens["ids"].tolist() for micro in micro_batches(batch, budget, padded=padded)]
    assert [micro.tokens["ids"].tolist() for micro in share.micro_batches] == wanted
    assert not share.num_fillers


def spoilt(world: ParallelContext, error: Exception) -> str:
    def work(mine: list[int]) -> list[int]:
        if world.peers.rank == 1:
            raise error
        return mine

    try:
        run_partitioned(world.peers, [0, 1, 2, 0], work)
    except Exception as found:
        said = f"{type(found).__name__} {getattr(found, 'exit_code', None)}: {found}"
    assert run_partitioned(world.peers, [2, 0, 2, 1], lambda mine: [10 * at for at in mine]) == [0, 10, 20, 30]
    assert run_on_rank0(world.peers, lambda: world.peers.rank) == 0
    return said


def test_what_one_rank_raises_all_raise_and_it_is_named() -> None:
    assert on_ranks(3, spoilt, DataError("row 7 is empty")) == [
        "RunnerError 3: rank 1: row 7 is empty",
        "DataError 3: row 7 is empty",
        "RunnerError 3: rank 1: row 7 is empty",
    ]
    assert on_ranks(3, spoilt, KeyError("x"))[2] == "RunnerError 1: rank 1: KeyError: 'x'"


def test_a_single_process_raises_its_own() -> None:
    def work(mine: list[int]) -> list[int]:
        raise RunnerError("as it is")

    try:
        run_partitioned(SingleProcess(), [0], work)
    except RunnerError as error:
        assert str(error) == "as it is"


def test_gradients_are_scaled_only_above_the_norm() -> None:
    gradients = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])]
    clip_grads_with_norm_(5.1, gradients, total_norm(gradients))
    assert [one._version for one in gradients] == [0, 0], "nothing is written at factor 1"
    clip_grads_with_norm_(1.0, gradients, total_norm(gradients))
    torch.testing.assert_close(gradients, [torch.tensor([0.6, 0.0]), torch.tensor([[0.8]])])
