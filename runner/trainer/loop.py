"""The one loop.

    collect ─▶ prepare ─▶ forward_backward · optim_step ─▶ publish ─▶ callbacks
    (feed)     (trainer)   (per mini-batch and role)

It knows no algorithm, no device and no file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from runner.core.batch import Batch
from runner.core.metrics import Metrics
from runner.core.signals import StopSignal
from runner.interfaces import Algorithm, Callback, Device, Learner, Model, Peers, Role, StepEnd
from runner.trainer.rollout_feed import Feed


@dataclass(frozen=True, slots=True)
class Job:
    """Everything a run needs, built; `models` holds the learners too, under their roles. `peers` run the same job, and
    all of them stop at the same step. `flops`: of each learner's update with a batch; `peak_flops`: the most that one
    device computes per second."""

    steps: int
    device: Device
    peers: Peers
    algorithm: Algorithm
    feed: Feed[Any]
    publish: Callable[[int], None]
    learners: Mapping[Role, Learner]
    models: Mapping[Role, Model]
    callbacks: Sequence[Callback]
    stop: StopSignal
    flops: Mapping[Role, Callable[[Batch], float]]
    peak_flops: float
    closing: Sequence[Callable[[], None]] = ()  # what holds processes or connections, ended with the run


def run(job: Job, first: int) -> None:
    """Run steps first … steps-1 (0-based). Raises Interrupted, after the callbacks saved, when a signal arrived."""
    with ExitStack() as ends:
        ends.enter_context(job.feed)  # left last: what it still waits for may end only with what is closed
        for close in job.closing:
            ends.callback(close)
        for callback in job.callbacks:
            callback.on_start(first)
        job.publish(first)
        job.feed.start(first)
        for step in range(first, job.steps):
            end = _one_step(job, step)
            job.publish(step + 1)
            job.feed.published(step)
            job.stop.agree(job.peers.gather)
            end.stopping = job.stop.requested
            for callback in job.callbacks:
                callback.on_step(end)
            if end.stopping:  # a signal that came during the callbacks waits for the next step, which will be saved
                job.stop.raise_if_requested(end.step, job.steps)
    for callback in job.callbacks:
        callback.on_end()


def _one_step(job: Job, step: int) -> StepEnd:
    """Collect, learn, and measure."""
    begin = time.perf_counter()
    experience = job.feed.take(step)
    collected = time.perf_counter()
    metrics, tokens, learnt, flops = Metrics(), 0, 0, 0.0
    for learner in job.learners.values():
        learner.begin_step(step)
    for batch in job.algorithm.prepare(experience, job.models):
        tokens += batch.num_tokens
        learnt += batch.totals["tokens"]
        for role, loss in job.algorithm.losses.items():
            metrics.merge(job.learners[role].forward_backward(batch, loss)[0])
            metrics.merge(job.learners[role].optim_step())
            flops += job.flops[role](batch)
    job.device.synchronize()
    end = time.perf_counter()
    device_s = (end - begin) * job.peers.size
    described, samples = job.algorithm.describe(step, experience)
    values = {
        **metrics.result(),
        **described,
        "train/tokens": float(learnt),
        "perf/tokens_per_s": tokens / device_s,
        "perf/model_flops": flops,
        "perf/mfu": flops / device_s / job.peak_flops,
        "perf/step_s": end - begin,
        "perf/peak_memory_bytes": float(max(job.peers.gather(job.device.peak_memory_bytes()))),
        "time/collect_s": collected - begin,
        "time/update_s": end - collected,
    }
    job.algorithm.observe(step, values)
    return StepEnd(step + 1, values, last=step + 1 == job.steps, samples=samples)
