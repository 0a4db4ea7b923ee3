"""Sends the policy's weights to the sampler, by one of the transports (`transports`).

version v = the weights after v steps;  step s is sampled with version max(s - lag, the first one of this attempt)
An interruptible sampler then loads newer versions by itself; the step's version stays that of its journal.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from runner.core.batch import pack
from runner.distributed.work_partition import SINGLE_PROCESS, run_on_all
from runner.interfaces import LOGPROBS, BaseCallback, Model, RankCollectives, Sampler, StepResult
from runner.weight_sync.sync_probe import SyncProbe
from runner.weight_sync.transports import WeightTransport

T = TypeVar("T")


@dataclass(eq=False)
class Publisher(BaseCallback):
    """Called by the trainer (`publish`) and, ahead of it, by the thread that collects (`load_for`).

    probe: None = the sampler's weights cannot be others than the trainer's; learner: what the probe compares with;
    peers: all ranks, for the thread that collects
    """

    route: WeightTransport
    sampler: Sampler
    lag: int
    probe: SyncProbe | None = None
    learner: Model | None = None
    peers: RankCollectives = SINGLE_PROCESS
    _first: int | None = None
    _loaded: int | None = None
    _numbers: dict[str, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def publish(self, version: int) -> None:
        """Send the weights after `version` steps, or keep them until they are due. Collective."""
        self._first = version if self._first is None else self._first
        oldest = version - self.lag
        if self.probe is not None and self.learner is not None:
            self.probe.expect(version, scores(self.learner, self.probe.rows))
            self.probe.drop_below(oldest)
        self.route.drop_below(oldest)  # whatever is being collected is due to `oldest` at least
        begin = time.perf_counter()
        if sent := self.route.publish(version):
            seconds = time.perf_counter() - begin
            self._note({"weight_sync/send_s": seconds, "weight_sync/gb_per_s": sent / seconds / 1e9})
            self._note({"weight_sync/bytes": float(sent)})

    def before(self, collect: Callable[[int], T]) -> Callable[[int], T]:
        """`collect`, with the sampler holding the weights that are due to the step.

        Between two steps that are not sampled ahead it need not hold anything.
        """

        def collect_with_weights(step: int) -> T:
            self.load_for(step)
            found = collect(step)
            if self.lag == 0:
                self.sampler.release_memory()
            return found

        return collect_with_weights

    def load_for(self, step: int) -> None:
        """Give the sampler the weights of `step`, unless it has them. Collective.

        Raises SamplerError, on all ranks, where it does not take them.
        """
        assert self._first is not None  # a first version was published
        version = max(step - self.lag, self._first)
        if version != self._loaded:
            begin = time.perf_counter()
            run_on_all(self.peers, lambda: self._load(version))
            self._loaded = version
            if self.route.get(version) is not None:
                self._note({"weight_sync/load_s": time.perf_counter() - begin})

    def on_step(self, end: StepResult) -> None:
        """Add metrics of the newest weights sent: bytes, seconds, and the sampler's distance then.

        Also what the sampler has measured since the last step.
        """
        measured = {f"sampler/{name}": value for name, value in self.sampler.pop_metrics().items()}
        with self._lock:
            end.values.update({**self._numbers, **measured})

    def close(self) -> None:
        """Remove what was sent."""
        self.route.close()

    def _load(self, version: int) -> None:
        weights = self.route.get(version)
        if self.probe is None:
            self.sampler.load_weights(weights, version)
        else:
            self.probe.load(self.sampler, weights, version)
            self._note({"weight_sync/logprob_error": self.probe.last_difference})

    def _note(self, numbers: Mapping[str, float]) -> None:
        with self._lock:
            self._numbers.update(numbers)


def scores(model: Model, rows: Sequence[Sequence[int]]) -> list[list[float]]:
    """Of each row the model's log-probabilities of all ids but the first, at temperature 1. Collective."""
    batch = pack(rows, [[1.0] * len(row) for row in rows])
    found = model.forward(batch, LOGPROBS)["logprobs"].tolist()
    ends = [sum(len(row) for row in rows[: at + 1]) for at in range(len(rows))]
    return [found[end - len(row) + 1 : end] for end, row in zip(ends, rows, strict=True)]
