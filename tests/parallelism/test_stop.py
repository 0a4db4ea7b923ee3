"""A signal to one rank ends all after the same step, and none before its callbacks have saved."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest

from runner.core.errors import Interrupted
from runner.core.signals import StopSignal
from runner.interfaces import BaseCallback, StepResult
from runner.parallelism.parallel_context import ParallelContext
from runner.trainer.loop import run_loop
from tests.parallelism.worlds import on_ranks
from tests.trainer.test_loop import job


class Told(BaseCallback):
    """Sends this process a signal in one step, on one rank; remembers where it was told to stop."""

    def __init__(self, step: int) -> None:
        self.step, self.saved = step, list[int]()

    def on_step(self, end: StepResult) -> None:
        if end.step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)
        if end.stopping:
            self.saved.append(end.step)


def stopped(world: ParallelContext, steps: tuple[int, int]) -> tuple[str, list[int]]:
    stop, told = StopSignal(), Told(steps[world.peers.rank])
    stop.install()
    try:
        run_loop(replace(job([told], stop=stop), peers=world.peers), 0)
    except Interrupted as error:
        return f"{error.exit_code}: {error}", told.saved
    return "finished", told.saved


@pytest.mark.parametrize(("steps", "last"), [((0, 2), 3), ((2, 2), 3), ((3, 2), 3), ((0, 5), 6)])
def test_all_ranks_stop_after_the_step_in_which_they_agreed(steps: tuple[int, int], last: int) -> None:
    """A signal while callbacks run waits for the next step; a later one of another rank is no second signal."""
    said = f"143: SIGTERM after step {last} of 6; a checkpoint was written" if last < 6 else "finished"
    assert on_ranks(2, stopped, steps) == [(said, [last])] * 2
