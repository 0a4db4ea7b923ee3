"""Gradients of replicated models: summed while the last backward pass runs, in one order on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runner.algorithm.sft import CrossEntropy
from runner.distributed import gradient_sums
from runner.distributed.gradient_sums import MeshGradientReducer, PendingSums, sum_during_backward
from runner.parallelism.parallel_context import ParallelContext
from tests.model import zoo
from tests.parallelism.test_fsdp_communication import Collectives
from tests.parallelism.test_learning import given, learner, made
from tests.parallelism.worlds import on_ranks

CPU = torch.device("cpu")


def sent(world: ParallelContext, adapter: bool) -> tuple[list[Any], int, int]:
    """The order of sums and layers' backward passes in the last micro-batch, micro-batches, and what learns."""
    gradient_sums.BUCKET_BYTES = 1  # a bucket for each parameter
    subject = learner(made("qwen2", adapter, "packed"), world, budget=20)
    passes: list[None] = []
    seen = Collectives()
    for at, block in enumerate(subject.model.transformer_blocks()):
        block.mlp.register_full_backward_pre_hook(lambda *_, at=at: seen.events.append(at))  # type: ignore[misc]
    subject.model.whole.register_forward_pre_hook(lambda *_: passes.append(None))
    with seen:
        subject.forward_backward(given(0), CrossEntropy())
    return [e for e in seen.events if e in (0, 1, "allreduce_")], len(passes), len(subject.model.trainable())


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
def test_sums_begin_in_the_last_backward_pass_and_only_there(adapter: bool) -> None:
    for events, passes, learning in on_ranks(2, sent, adapter):
        earlier, last = events[: 2 * (passes - 1)], events[2 * (passes - 1) :]
        assert passes > 2 and earlier == [1, 0] * (passes - 1)
        assert last.count("allreduce_") == learning + 1, "one more says which gradients there are"
        assert last[: last.index(0)].count("allreduce_") > learning // 4, "those of the last layer overlap the first's"


def unequal(world: ParallelContext) -> list[list[float] | None]:
    """What is left of gradients where the ranks' passes reach other parameters, in another order."""
    gradient_sums.BUCKET_BYTES = 8
    first, second, third, nobody = parameters = [nn.Parameter(torch.ones(2)) for _ in range(4)]
    rank = world.peers.rank
    reducer = MeshGradientReducer(world.peers, CPU)
    with reducer.backward(parameters, is_last=False):
        (first * (rank + 1)).sum().backward()
    with reducer.backward(parameters, is_last=True):
        total = (third * 2 + second).sum() if rank else (2 * second).sum()
        total.backward()  # type: ignore[no-untyped-call]
    return [None if p.grad is None else p.grad.tolist() for p in (first, second, third, nobody)]


def test_ranks_that_reach_other_parameters_end_with_the_same_gradients() -> None:
    assert on_ranks(2, unequal) == [[[3.0, 3.0], [3.0, 3.0], [2.0, 2.0], None]] * 2


def test_a_gradient_that_is_accumulated_twice_in_a_pass_is_an_error() -> None:
    def twice(world: ParallelContext) -> None:
        parameter = nn.Parameter(torch.ones(2))
        with sum_during_backward([parameter], world.peers):
            for _ in range(2):
                parameter.sum().backward()  # type: ignore[no-untyped-call]

    with pytest.raises(AssertionError, match="KeyError"):
        on_ranks(2, twice)


def test_no_more_than_two_buckets_are_in_flight() -> None:
    flying: list[Tensor] = []
    most = 0

    def start(bucket: Any) -> Any:
        nonlocal most
        flying.extend(bucket)
        most = max(most, len(flying))
        return lambda: flying.pop(0)

    sums = PendingSums(start)
    for _ in range(5):
        sums.add([zoo.CPU])  # type: ignore[list-item]
    assert most == 2 and len(flying) == 2
    sums.finish()
    assert not flying
