"""What is said of a model that is another one when it was spread, and by whom."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from runner.core.auto_choices import Decisions
from runner.core.errors import SpecError
from runner.parallelism.apply import refuse_changed_model
from runner.parallelism.config import EpConfig
from runner.parallelism.mesh import Mesh
from runner.parallelism.process_groups import ProcessGroupCollectives
from tests.model import zoo
from tests.parallelism.forked import TIMEOUT_S, ranks
from tests.parallelism.worlds import meshed

WANTED = torch.zeros(1)


class Other:
    """A model that has become another one on rank 1, which alone can tell."""

    inner = None

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def matches_probe(self, wanted: Tensor) -> bool:
        return not self._rank


class Full:
    """One that the device has no room for."""

    inner = None

    def matches_probe(self, wanted: Tensor) -> bool:
        raise torch.OutOfMemoryError("out of memory")


def test_what_one_rank_finds_all_refuse() -> None:
    def work(rank: int) -> None:
        everyone = ProcessGroupCollectives(torch.distributed.group.WORLD, TIMEOUT_S)
        with pytest.raises(SpecError, match="NoneType computes different values with pipeline parallelism"):
            refuse_changed_model(Other(rank), WANTED, everyone, "pp")

    ranks(2, work)


def test_memory_that_is_exhausted_is_no_fault_of_the_model() -> None:
    peers: Any = None
    with pytest.raises(torch.OutOfMemoryError):
        refuse_changed_model(Full(), WANTED, peers, "pp")


def test_experts_that_give_something_else_are_refused_by_their_own_option() -> None:
    def work(rank: int) -> str:
        model: Any = zoo.causal("qwen3_moe", num_experts=4, mlp_only_layers=[])
        model.matches_probe = lambda wanted: False
        with pytest.raises(
            SpecError, match=r"computes different values with expert parallelism; .*parallelism\.ep=1"
        ) as error:
            meshed(EpConfig(), Mesh(dp_replicate=2, ep=2)).shard(model, Decisions())
        return error.value.problems[0].key

    assert ranks(2, work) == ["parallelism.ep"] * 2
