"""What torch's own collectives raise, where layers are cut over ranks, becomes an error that names what happened."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import distributed

from runner.core.errors import RankLost, RunnerError
from runner.core.rank_info import RankInfo
from runner.launch.session import translate_rank_errors
from tests.parallelism.forked import ranks


def _summing(rank: int, over: Path) -> str:
    group = distributed.new_group(backend="gloo")
    distributed.all_reduce(torch.ones(1), group=group)
    if rank == 1:
        while not over.exists():
            time.sleep(0.01)
        return ""
    distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=0.5), group)  # it has connected by now
    try:
        with translate_rank_errors(RankInfo(0, 2, 0, 2)):
            distributed.all_reduce(torch.ones(1), group=group)
    except RunnerError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        over.touch()
    return "nothing"


def test_a_rank_that_does_not_come_is_a_deadline(tmp_path: Path) -> None:
    said, _ = ranks(2, _summing, tmp_path / "over")
    assert said.startswith("DeadlineExceeded: rank 0 of 2 waited for another rank longer than parallelism.timeout_s")


def test_other_errors_pass_through() -> None:
    with pytest.raises(RuntimeError, match="timed out"), translate_rank_errors(RankInfo()):
        raise RuntimeError("a library of one process timed out")
    with pytest.raises(RankLost), translate_rank_errors(RankInfo(0, 2, 0, 2)):
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1")
