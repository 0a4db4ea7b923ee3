"""Real groups: sums in buckets, values in the order of the ranks, and a rank that does not come."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

from runner.core.errors import DeadlineExceeded, RankLost
from runner.core.rank_info import RankInfo
from runner.distributed import gradient_sums
from runner.distributed.gradient_sums import buckets_by_dtype, sum_gradients
from runner.parallelism.config import DdpConfig, PpConfig
from runner.parallelism.parallel_context import ParallelContext, build
from runner.parallelism.process_groups import ProcessGroupCollectives
from tests.parallelism.forked import TIMEOUT_S, ranks
from tests.parallelism.worlds import device, on_ranks
from tests.ports import free_port


def tensors(rank: int) -> list[Tensor]:
    """Of several shapes and types, one without an element, one not contiguous."""
    generator = torch.Generator().manual_seed(rank)
    found = [torch.randn(shape, generator=generator) for shape in [(3, 5), (1,), (0,), (2, 3, 4), (7, 2)]]
    return [*found, torch.arange(4) + rank, found[0].bfloat16(), torch.randn(4, 6, generator=generator).t()]


def summed(world: ParallelContext, bucket_bytes: int) -> tuple[list[Tensor], list[Any]]:
    gradient_sums.BUCKET_BYTES = bucket_bytes
    mine = tensors(world.peers.rank)
    world.peers.all_reduce_(mine)
    both = (
        world.peers.all_gather({"rank": world.peers.rank}),
        world.rollout_peers.all_gather(torch.ones(world.peers.rank + 1)),
    )
    return mine, list(both)


@pytest.mark.parametrize("bucket_bytes", [1, 100, 10**9])
def test_sums_are_those_of_all_ranks_whatever_the_buckets(bucket_bytes: int) -> None:
    wanted = [a + b for a, b in zip(tensors(0), tensors(1), strict=True)]
    for found, gathered in on_ranks(2, summed, bucket_bytes):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
        assert gathered[0] == [{"rank": 0}, {"rank": 1}] and [t.tolist() for t in gathered[1]] == [[1.0], [1.0, 1.0]]


def halves(world: ParallelContext) -> Tensor:
    mine = [torch.full((3,), 1.0 if world.peers.rank == 0 else 2.0**-8, dtype=torch.bfloat16)]
    world.peers.all_reduce_(mine)
    return mine[0]


def test_half_precision_is_added_in_float32_and_rounded_once() -> None:
    wanted = (1 + 3 * torch.tensor(2.0**-8)).bfloat16()  # one after the other, each 2^-8 would be rounded away
    for found in on_ranks(4, halves):
        assert found.dtype == torch.bfloat16 and found.tolist() == [float(wanted)] * 3
        assert float(wanted) > 1


def exhausted(world: ParallelContext) -> str:
    def full(*_: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    torch.cat = full  # type: ignore[assignment]
    with pytest.raises(torch.OutOfMemoryError) as caught:
        world.peers.all_reduce_([torch.ones(2)])
    return str(caught.value)


def test_an_exhausted_device_is_not_taken_for_a_rank_that_does_not_come() -> None:
    assert on_ranks(1, exhausted) == ["CUDA out of memory"]


def test_buckets_hold_all_in_order_one_type_each_and_not_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_sums, "BUCKET_BYTES", 100)
    given = [torch.zeros(n, dtype=d) for n, d in [(10, torch.float32), (10, torch.float32), (10, torch.float32)]]
    given += [torch.zeros(3, dtype=torch.bfloat16), torch.zeros(500)]
    assert [[len(t) for t in bucket] for bucket in buckets_by_dtype(given)] == [[10, 10], [10], [3], [500]]


def gradients(world: ParallelContext) -> list[list[float] | None]:
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    if world.peers.rank == 1:
        parameters[0].grad = torch.full((2,), 3.0)
    parameters[1].grad = torch.ones(2)
    sum_gradients(parameters, world.peers)
    return [None if p.grad is None else p.grad.tolist() for p in parameters]


def test_a_gradient_that_one_rank_lacks_counts_as_zero_and_one_that_all_lack_stays_away() -> None:
    assert on_ranks(2, gradients) == [[[3.0, 3.0], [2.0, 2.0], None]] * 2


def late(rank: int, failed: Path) -> str:
    """Rank 1 does not come until rank 0 has given up."""
    group = torch.distributed.new_group(backend="gloo", timeout=_seconds(TIMEOUT_S))
    if rank == 1:
        while not failed.exists():
            time.sleep(0.01)
        return "nothing"
    distributed.distributed_c10d._set_pg_timeout(_seconds(1), group)
    try:
        ProcessGroupCollectives(group, 1.0).all_gather(rank)
    except (DeadlineExceeded, RankLost) as error:
        return str(error)
    finally:
        failed.touch()
    return "nothing"


def _seconds(number: float) -> Any:
    from datetime import timedelta

    return timedelta(seconds=number)


def test_a_rank_that_does_not_come_is_an_error_that_says_how_long_was_waited(tmp_path: Path) -> None:
    said = ranks(2, late, tmp_path / "failed")[0]
    assert "rank 0 of 2, gathering: another rank exited, or did not arrive within parallelism.timeout_s=1" in said


def met(rank: int, port: int) -> int:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    world = build(DdpConfig(timeout_s=TIMEOUT_S), device=device(), place=RankInfo(rank, 2, rank, 2))
    found = sum(world.peers.all_gather(rank + 1))
    world.close()
    return found


def test_ranks_meet_at_the_address_of_the_environment_and_part() -> None:
    assert ranks(2, met, free_port(), join=False) == [3, 3]


def warm(rank: int, port: int) -> tuple[int, int]:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    used, add = set[Any](), distributed.all_reduce

    def noting(tensor: torch.Tensor, *, group: Any, **options: Any) -> Any:
        used.add(group)
        return add(tensor, group=group, **options)

    distributed.all_reduce = noting
    world = build(
        PpConfig(pp=2, dp_replicate=2, tp=1, timeout_s=TIMEOUT_S), device=device(), place=RankInfo(rank, 4, rank, 4)
    )
    assert world.groups is not None
    every = set(world.groups.by_name.values())
    world.close()
    return len(every), len(every - used)


def test_every_group_has_met_before_the_job_begins() -> None:
    for groups, cold in ranks(4, warm, free_port(), join=False):
        assert groups > 3
        assert cold == 0


def handed(world: ParallelContext, kind: torch.dtype, shape: tuple[int, ...]) -> bool:
    wanted = torch.arange(7.0).repeat(100)[: math.prod(shape)].view(shape).to(kind)
    if kind.is_floating_point and wanted.numel():
        wanted.view(-1)[0] = float("nan")
    given = wanted.clone() if world.peers.rank == 0 else torch.zeros_like(wanted)
    world.peers.broadcast_(given)
    return torch.equal(given.reshape(-1).view(torch.int8), wanted.reshape(-1).view(torch.int8))


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_what_the_first_rank_gives_is_everyones_bit_for_bit(kind: torch.dtype) -> None:
    for shape in ((), (0,), (5, 3)):
        assert on_ranks(3, handed, kind, shape) == [True] * 3
