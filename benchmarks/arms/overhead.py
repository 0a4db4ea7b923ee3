"""The loop's own processor seconds: those of a step that lie outside collecting, preparing, learning and stepping.

python -m arms.overhead RESULT OVERRIDE …

Runs `python -m runner OVERRIDE …` in this process. The clock is read around the four verbs in the main thread, and
around the whole loop in all threads: what lies between is the feed, metrics, callbacks, records and trackers.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from arms import runner_cli

VERBS = ("forward_backward", "optim_step")
WARM_UP = 2


class Timed:
    """Anything, with the main thread's processor seconds inside some of its methods added up."""

    def __init__(self, inner: Any, clock: Clock, methods: tuple[str, ...]) -> None:
        self._inner, self._clock, self._methods = inner, clock, methods

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return self._clock.around(found) if name in self._methods else found

    def prepare(self, *arguments: Any) -> Iterator[Any]:
        """The algorithm's batches; the clock runs while it makes them."""
        batches = iter(self._inner.prepare(*arguments))
        following = self._clock.around(lambda: next(batches, None))
        while (batch := following()) is not None:
            yield batch


class Clock:
    """Seconds inside the verbs so far, and readings at the end of each step."""

    def __init__(self) -> None:
        self.inside, self.steps = 0.0, list[tuple[float, float]]()

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, with its seconds counted."""

        def timed(*arguments: Any, **options: Any) -> Any:
            begin = time.thread_time()
            try:
                return function(*arguments, **options)
            finally:
                self.inside += time.thread_time() - begin

        return timed

    def on_step(self, *_: Any) -> None:
        """The last callback of a step."""
        self.steps.append((time.process_time(), self.inside))

    def job(self, job: Any) -> Any:
        """The job with everything that is not the loop's timed."""
        job.feed.take = self.around(job.feed.take)
        last = job.callbacks[-1]
        last.on_step = _both(last.on_step, self.on_step)
        learners = {role: Timed(learner, self, VERBS) for role, learner in job.learners.items()}
        return replace(job, learners=learners, algorithm=Timed(job.algorithm, self, ()))

    def result(self) -> dict[str, float]:
        """Processor seconds of the steps that count, and those outside the verbs; the last step writes a checkpoint."""
        (first, before), (end, after) = self.steps[WARM_UP - 1], self.steps[-2]
        steps = len(self.steps) - WARM_UP - 1
        return {"step_cpu_s": (end - first) / steps, "own_cpu_s": (end - first - after + before) / steps}


def _both(first: Callable[..., None], second: Callable[..., None]) -> Callable[..., None]:
    def run(*arguments: Any) -> None:
        first(*arguments)
        second(*arguments)

    return run


def main(result: Path, typed: list[str]) -> None:
    """Run and write the result."""
    import runner.trainer.loop as loop

    clock, run = Clock(), loop.run_loop
    loop.run_loop = lambda job, first: run(clock.job(job), first)
    runner_cli.run(typed)
    result.write_text(json.dumps(clock.result()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
