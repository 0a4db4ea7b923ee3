"""The one loop, and the feed that runs collection up to `lag` steps ahead of it.

    collect ─▶ prepare ─▶ update                     ─▶ read ─▶ publish ─▶ callbacks
    (feed)     (trainer)   (per mini-batch and role)

    step s is collected with exactly the weights published after step s - 1 - lag
    (the first ones for the first lag + 1 steps; an interruptible sampler then loads newer ones)

With lag = 0 collection runs in the caller, strictly on-policy; with lag = k it runs in one thread, k steps ahead. Rows
of data need no weights: they are read one step ahead. The loop knows no algorithm, no device and no file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import product
from types import TracebackType
from typing import Any, Generic, TypeVar

from runner.core.batch import Batch
from runner.core.metrics import Metrics
from runner.core.signals import StopSignal
from runner.interfaces import Algorithm, Callback, Device, Learner, Model, RankCollectives, Role, State, StepResult

T = TypeVar("T")


@dataclass(eq=False)
class ExperienceQueue(Generic[T]):
    """Experiences up to step last-1, in order. Consumes `collect(step)`; waits in `take` and `state_dict`.

    encode, decode: an experience as a checkpoint keeps it, and back
    """

    collect: Callable[[int], T]
    last: int
    lag: int
    encode: Callable[[T], State]
    decode: Callable[[State], T]
    _next: int = 0
    _pending: dict[int, Future[T]] = field(default_factory=dict)
    _pool: ThreadPoolExecutor | None = None

    def start(self, first: int) -> None:
        """Begin to collect, at `first` or after what a checkpoint brought."""
        self._next = max([first, *(step + 1 for step in self._pending)])
        if self.lag:
            self._pool = ThreadPoolExecutor(1, "feed")
        self._submit_until(first + self.lag)

    def take(self, step: int) -> T:
        """The experience of `step`; raises what its collection raised."""
        return self._pending.pop(step).result() if step in self._pending else self.collect(step)

    def on_weights_published(self, step: int) -> None:
        """The weights after `step` are in place, so one more step may be collected."""
        self._submit_until(step + 1 + self.lag)

    def state_dict(self) -> State:
        """Every experience that was collected ahead, by its step; waits for those being collected."""
        encoded = {step: self.encode(future.result()) for step, future in self._pending.items()}
        tensors = {f"{step}/{name}": t for step, one in encoded.items() for name, t in one.pop("tensors", {}).items()}
        return {"steps": {str(step): one for step, one in encoded.items()}, "tensors": tensors}

    def load_state_dict(self, state: State) -> None:
        """Take back what `state_dict` gave; `start` continues behind it."""
        for name, one in state["steps"].items():
            mine = {k.removeprefix(f"{name}/"): t for k, t in state["tensors"].items() if k.startswith(f"{name}/")}
            future: Future[T] = Future()
            future.set_result(self.decode({**one, "tensors": mine}))
            self._pending[int(name)] = future

    def _submit_until(self, step: int) -> None:
        if self._pool is None:
            return
        while self._next <= min(step, self.last - 1):
            self._pending[self._next] = self._pool.submit(self.collect, self._next)
            self._next += 1

    def __enter__(self) -> ExperienceQueue[T]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


class ReadAheadQueue(ExperienceQueue[Any]):
    """Rows of data, read a step ahead into the learners' micro-batches; checkpoints keep none."""

    def __init__(self, algorithm: Any, learners: Mapping[Role, Any], last: int) -> None:
        def collect(step: int) -> Any:
            experience = algorithm.collect(step)
            for role, batch in product(algorithm.losses, algorithm.mini_batches(experience)):
                learners[role].read_ahead(batch)
            return experience

        super().__init__(collect, last, 1, encode=algorithm.encode, decode=algorithm.decode)

    def state_dict(self) -> State:
        return {"steps": {}, "tensors": {}}


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """Everything that a run needs.

    models: learners and frozen models by role; peers: ranks that run the same job and stop at the same step; flops: of
    each learner's update with a batch; peak_flops: peak operations per second of one device
    """

    steps: int
    device: Device
    peers: RankCollectives
    algorithm: Algorithm
    feed: ExperienceQueue[Any]
    publish: Callable[[int], None]
    learners: Mapping[Role, Learner]
    models: Mapping[Role, Model]
    callbacks: Sequence[Callback]
    stop: StopSignal
    flops: Mapping[Role, Callable[[Batch], float]]
    peak_flops: float
    closing: Sequence[Callable[[], None]] = ()  # what holds processes or connections, ended with the run


def run_loop(job: TrainingJob, first: int) -> int:
    """Run steps first … steps-1 (0-based), or until a callback ends the run; returns the steps done.

    Raises Interrupted, after callbacks have saved, on a signal.
    """
    done = first
    with ExitStack() as ends:
        ends.enter_context(job.feed)  # left last: what it still waits for may end only with what is closed
        for close in job.closing:
            ends.callback(close)
        for callback in job.callbacks:
            callback.on_start(first)
        job.publish(first)
        job.feed.start(first)
        for step in range(first, job.steps):
            end = _run_step(job, step)
            job.publish(step + 1)
            job.feed.on_weights_published(step)
            job.stop.agree_across_ranks(job.peers.all_gather)
            end.stopping, end.saving = job.stop.is_requested, job.stop.checkpoint_requested
            for callback in job.callbacks:
                callback.on_step(end)
            done = end.step
            if end.last:
                break
            if end.stopping:  # a signal that came during the callbacks waits for the next step, which will be saved
                job.stop.raise_if_requested(end.step, job.steps)
    for callback in job.callbacks:
        callback.on_end()
    return done


def _run_step(job: TrainingJob, step: int) -> StepResult:
    """Collect, learn, and measure."""
    begin = time.perf_counter()
    experience = job.feed.take(step)
    collected = time.perf_counter()
    metrics, tokens, trained_tokens, flops, updates = Metrics(), 0, 0, 0.0, []
    for learner in job.learners.values():
        learner.begin_step(step)
    for batch in job.algorithm.prepare(experience, job.models):
        tokens += batch.num_tokens
        trained_tokens += batch.totals["tokens"]
        for role, loss in job.algorithm.losses.items():
            updates.append(job.learners[role].update(batch, loss))
            flops += job.flops[role](batch)
    for read in updates:  # before weights are published or saved: it raises if one was not finite
        metrics.merge(read())
    job.device.synchronize()
    end = time.perf_counter()
    device_s = (end - begin) * job.peers.size
    described, samples = job.algorithm.describe(step, experience)
    values = {
        **metrics.result(),
        **described,
        "train/tokens": float(trained_tokens),
        "perf/tokens_per_s": tokens / device_s,
        "perf/model_flops": flops,
        "perf/mfu": flops / device_s / job.peak_flops,
        "perf/step_s": end - begin,
        "perf/peak_memory_bytes": float(max(job.peers.all_gather(job.device.peak_memory_bytes()))),
        "time/data_wait_s": collected - begin,
        "time/update_s": end - collected,
    }
    job.algorithm.observe(step, values)
    return StepResult(step + 1, values, last=step + 1 == job.steps, samples=samples)
