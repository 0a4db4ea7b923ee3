"""The order of passes: each once, none before what it needs, no rank waiting for ever, no more kept than need be."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from runner.distributed.work_partition import SINGLE_STAGE
from runner.interfaces import PipelineOp
from runner.parallelism.pipeline_parallel import forward_schedule, num_warmup_forwards, one_f_one_b

SIZES = st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(0, 20))  # stages, runs of layers on each, count


def needed(rank: int, turn: PipelineOp, stages: int, chunks: int) -> tuple[int, PipelineOp] | None:
    """The pass of another rank that a pass waits for; what it waits for on its own rank is the order's to see to."""
    depth = turn.chunk * stages + rank
    before = depth + 1 if turn.backward else depth - 1
    if not 0 <= before < stages * chunks or stages == 1:
        return None
    return before % stages, turn._replace(chunk=before // stages)


def played(orders: list[list[PipelineOp]], chunks: int, room: int) -> int:
    """Passes that have been made when no rank can continue: each takes its next one as soon as what it needs was sent,
    and as there are not more than `room` messages of a kind that its neighbor has not taken."""
    stages = len(orders)
    done, at = set[tuple[int, PipelineOp]](), [0] * stages
    taken, sent = Counter[tuple[int, bool]](), Counter[tuple[int, bool]]()
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while at[rank] < len(order):
                turn = order[at[rank]]
                source, depth = needed(rank, turn, stages, chunks), turn.chunk * stages + rank
                if source is not None and source not in done:
                    break
                hands_on = stages > 1 and (depth > 0 if turn.backward else depth < stages * chunks - 1)
                if hands_on and sent[rank, turn.backward] - taken[rank, turn.backward] >= room:
                    break
                if source is not None:
                    taken[source[0], turn.backward] += 1
                sent[rank, turn.backward] += hands_on
                done.add((rank, turn))
                at[rank], moved = at[rank] + 1, True
    return sum(at)


@settings(max_examples=40)
@given(SIZES)
def test_every_pass_is_made_once_forward_before_backward(sizes: tuple[int, int, int]) -> None:
    stages, chunks, count = sizes
    for rank in range(stages):
        order = one_f_one_b(rank, stages, chunks, count)
        assert len(order) == len(set(order)) == 2 * chunks * count
        places = {turn: place for place, turn in enumerate(order)}
        assert all(places[turn] < places[turn._replace(backward=True)] for turn in order if not turn.backward)


@settings(max_examples=40)
@given(SIZES)
def test_no_rank_waits_for_ever(sizes: tuple[int, int, int]) -> None:
    stages, chunks, count = sizes
    room = 2 * stages * chunks
    orders = [one_f_one_b(rank, stages, chunks, count) for rank in range(stages)]
    assert played(orders, chunks, room) == 2 * stages * chunks * count
    assert played([forward_schedule(stages, chunks, count)] * stages, chunks, room) == stages * chunks * count


@settings(max_examples=40)
@given(SIZES)
def test_messages_are_taken_in_the_order_in_which_they_are_sent(sizes: tuple[int, int, int]) -> None:
    stages, chunks, count = sizes
    orders = [one_f_one_b(rank, stages, chunks, count) for rank in range(stages)]
    for backward in (False, True):
        for rank, order in enumerate(orders):
            wanted = [needed(rank, turn, stages, chunks) for turn in order if turn.backward == backward]
            for source in {one[0] for one in wanted if one is not None}:
                takes = {one[1]: None for one in wanted if one is not None and one[0] == source}
                assert list(takes) == [turn for turn in orders[source] if turn in takes]


@settings(max_examples=40)
@given(SIZES)
def test_no_more_passes_wait_than_the_paper_says(sizes: tuple[int, int, int]) -> None:
    stages, chunks, count = sizes
    for rank in range(stages):
        waiting = most = 0
        for turn in one_f_one_b(rank, stages, chunks, count):
            waiting += -1 if turn.backward else 1
            most = max(most, waiting)
        assert most <= min(num_warmup_forwards(rank, stages, chunks), chunks * count)
        assert chunks > 1 or most == min(stages - rank, count)


def test_the_paper_s_figures() -> None:
    def words(rank: int, stages: int, chunks: int, count: int) -> str:
        order = one_f_one_b(rank, stages, chunks, count)
        return " ".join(f"{'B' if one.backward else 'F'}{one.micro}{chr(39) * one.chunk}" for one in order)

    assert words(0, 4, 1, 5) == "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4"
    assert words(3, 4, 1, 3) == "F0 B0 F1 B1 F2 B2"
    assert words(0, 2, 2, 4) == "F0 F1 F0' F1' F2 B0' F3 B1' F2' B0 F3' B1 B2' B3' B2 B3"
    assert words(1, 2, 2, 2) == "F0 F1 F0' B0' F1' B1' B0 B1"


def test_one_stage_goes_through_one_micro_batch_after_the_other() -> None:
    assert list(SINGLE_STAGE.schedule(2)) == one_f_one_b(0, 1, 1, 2)
    assert list(SINGLE_STAGE.forward_schedule(2)) == forward_schedule(1, 1, 2)
