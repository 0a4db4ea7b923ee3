"""The loop: order of events, stopping by signal, and the same curve however often it is interrupted."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from typing import Any

import pytest
import torch

from runner.algorithm.config import SftConfig
from runner.algorithm.sft import CrossEntropy, PackedAlgorithm
from runner.core.errors import DataError, Interrupted
from runner.core.signals import StopSignal
from runner.device.config import CpuConfig
from runner.device.cpu import Cpu
from runner.distributed.work_partition import SingleProcess
from runner.interfaces import Callback, StepResult
from runner.trainer.callbacks import BaseCallback, LogStep, SaveCheckpoints
from runner.trainer.learner import LocalLearner
from runner.trainer.loop import ExperienceQueue, ReadAheadQueue, TrainingJob, run_loop
from tests.algorithm.test_sft import ThreeItems
from tests.toys import Bigram


def job(callbacks: list[Callback], steps: int = 6, stop: StopSignal | None = None) -> TrainingJob:
    model = Bigram()
    learner = LocalLearner(
        model,
        torch.optim.AdamW(list(model.trainable().values()), lr=0.1),
        lr=0.1,
        clip_norm=1.0,
        factor=lambda step: 1.0,
        budget=5,
        seed=0,
        device=torch.device("cpu"),
    )
    algorithm = PackedAlgorithm(SftConfig(batch_size=2), ThreeItems(), {"policy": CrossEntropy()})
    return TrainingJob(
        steps=steps,
        device=Cpu(CpuConfig(), decide=lambda *words: None),
        peers=SingleProcess(),
        algorithm=algorithm,
        feed=ExperienceQueue(algorithm.collect, steps, 0, encode=algorithm.encode, decode=algorithm.decode),
        publish=lambda version: None,
        learners={"policy": learner},
        models={"policy": learner},
        callbacks=callbacks,
        stop=stop or StopSignal(),
        flops={"policy": lambda batch: 100.0 * batch.num_tokens},
        peak_flops=1e9,
    )


def test_every_step_is_recorded_once_in_order_and_the_loss_falls() -> None:
    seen: list[tuple[int, float]] = []
    run_loop(job([LogStep([lambda step, values: seen.append((step, values["train/loss"]))])], steps=40), 0)
    assert [step for step, _ in seen] == list(range(1, 41))
    assert seen[-1][1] < 0.7 * seen[0][1]


def test_the_numbers_of_a_step() -> None:
    seen: dict[str, float] = {}
    run_loop(job([LogStep([lambda step, values: seen.update(values)])], steps=1), 0)
    assert set(seen) == {
        "train/loss",
        "train/grad_norm",
        "train/lr",
        "train/tokens",
        "perf/tokens_per_s",
        "perf/model_flops",
        "perf/mfu",
        "perf/step_s",
        "perf/peak_memory_bytes",
        "time/data_wait_s",
        "time/update_s",
    }
    assert seen["train/tokens"] == 3.0
    tokens = seen["perf/tokens_per_s"] * seen["perf/step_s"]
    assert seen["perf/model_flops"] == pytest.approx(100 * tokens)
    assert seen["perf/mfu"] == pytest.approx(1e-7 * seen["perf/tokens_per_s"])


class ScoreAndStop(BaseCallback):
    """Scores rows of data after each step, and keeps the state of step 3, at which it ends the run if asked."""

    def __init__(self, stops: bool) -> None:
        self.stops, self.job, self.state = stops, list[TrainingJob](), dict[str, Any]()

    def on_step(self, end: StepResult) -> None:
        [current] = self.job
        rows = current.algorithm.experience(ThreeItems().take(0, 3))  # type: ignore[attr-defined]
        current.learners["policy"].forward(rows, frozenset({"logprobs"}))
        if end.step == 3:
            assert current.feed.state_dict() == {"steps": {}, "tensors": {}}
            self.state = current.learners["policy"].state_dict()
            end.last |= self.stops


def table_after(state: dict[str, Any] | None, first: int, *, ahead: bool, stops: bool = False) -> tuple[Any, Any]:
    """The weights at the end of a job, and the state after step 3."""
    watch = ScoreAndStop(stops)
    one = job([watch])
    if ahead:
        one = replace(one, feed=ReadAheadQueue(one.algorithm, one.learners, one.steps))
    watch.job.append(one)
    if state:
        one.learners["policy"].load_state_dict(state)
    run_loop(one, first)
    [(_, table)] = one.learners["policy"].weights()
    return table.clone(), watch.state


def test_rows_that_were_read_ahead_give_the_same_bytes() -> None:
    wanted, _ = table_after(None, 0, ahead=False)
    assert torch.equal(table_after(None, 0, ahead=True)[0], wanted)
    stopped, state = table_after(None, 0, ahead=True, stops=True)
    assert not torch.equal(stopped, wanted)
    assert torch.equal(table_after(state, 3, ahead=True)[0], wanted)


def test_an_error_of_rows_that_are_read_ahead_is_raised_at_their_step() -> None:
    one, seen = job([LogStep([lambda step, values: seen.append(step)])]), list[int]()
    given = one.algorithm.collect

    def collect(step: int) -> Any:
        if step == 3:
            raise DataError("row 7 is empty")
        return given(step)

    one.algorithm.collect = collect  # type: ignore[method-assign]
    with pytest.raises(DataError, match="row 7"):
        run_loop(replace(one, feed=ReadAheadQueue(one.algorithm, one.learners, one.steps)), 0)
    assert seen == [1, 2, 3]


class Kill(BaseCallback):
    """Sends a signal to this very process after step 2."""

    def __init__(self, number: int) -> None:
        self.number = number

    def on_step(self, end: StepResult) -> None:
        if end.step == 2:
            os.kill(os.getpid(), self.number)


def saving(saved: list[int], started: list[int], every: int) -> SaveCheckpoints:
    """A callback that saves nothing but the numbers of the steps at which it would."""
    return SaveCheckpoints(
        lambda step, values: saved.append(step),
        lambda step, values: started.append(step),
        lambda: None,
        every=every,
    )


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_run_after_a_step_that_was_saved(number: int, code: int) -> None:
    previous = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    stop, saved, started = StopSignal(), list[int](), list[int]()
    stop.install()
    try:
        with pytest.raises(Interrupted) as caught:
            run_loop(job([Kill(number), saving(saved, started, every=1)], stop=stop), 0)
    finally:
        for known, handler in previous.items():
            signal.signal(known, handler)
    assert caught.value.exit_code == code
    assert saved, "a checkpoint must have been written before the run ended"
    assert len(saved) == 1 and started == list(range(1, saved[0])), "the last one is waited for"
    assert saved[-1] >= 2 and f"after step {saved[-1]} of 6" in str(caught.value)


def test_saving_every_few_steps_and_at_the_end() -> None:
    saved, started = list[int](), list[int]()
    run_loop(job([saving(saved, started, every=2)], steps=6), 0)
    assert (started, saved) == ([2, 4], [6])
