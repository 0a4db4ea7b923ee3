"""What follows from a job that failed: another try, or the end of the sweep."""

from __future__ import annotations

import time
from collections import Counter

from runner.errors import OutOfMemory
from runner.sweep.config import SweepConfig

FIRST_RETRY_S = 10.0
RETRIED = (OutOfMemory.exit_code,)  # and whatever a signal ended that was not ours


class Failures:
    """The tries of each job since the sweep was started, and how many of all have failed for good."""

    def __init__(self, options: SweepConfig) -> None:
        self._options = options
        self._tries: Counter[int] = Counter()
        self._not_before: dict[int, float] = {}
        self._count = 0

    def tried(self, index: int) -> None:
        """Count a try of a job."""
        self._tries[index] += 1

    def wait_s(self, index: int, code: int) -> float | None:
        """Seconds until a job that ended like this is tried again, each time twice as long; None: it is not."""
        if self._tries[index] > self._options.retries or not (code in RETRIED or code < 0):
            return None
        seconds = (self._options.retry_wait_s or FIRST_RETRY_S) * 2.0 ** (self._tries[index] - 1)
        self._not_before[index] = time.monotonic() + seconds
        return seconds

    def is_resting(self, index: int) -> bool:
        """Whether a job waits for its next try."""
        return self._not_before.get(index, 0.0) > time.monotonic()

    def reason_to_stop(self) -> str:
        """Count a failure; why the sweep stops with it, empty where it goes on."""
        self._count += 1
        most = 1 if self._options.fail_fast else self._options.max_failures
        if most is None or self._count < most:
            return ""
        return "stopped by sweep.fail_fast" if self._options.fail_fast else f"stopped by sweep.max_failures={most}"
