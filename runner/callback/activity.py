"""Adds what the device was doing to the steps' numbers, as `device/…`: read in a thread, as asking may take long."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from threading import Event, Thread

from runner.callback.base import NoOp
from runner.errors import RunnerError
from runner.protocols import StepEnd

log = logging.getLogger("runner")


Reading = Callable[[], Mapping[str, float]]


class Activity(NoOp):
    """Takes the readings every `every_s` seconds; a step that ends after that gets the numbers, the next ones do not.

    A reading that fails is said and left out from then on: a run does not end because a card cannot be watched.
    """

    def __init__(self, readings: Sequence[Reading], every_s: float) -> None:
        self._readings, self._every_s = list(readings), every_s
        self._ended = Event()
        self._newest: Mapping[str, float] = {}
        self._thread = Thread(target=self._watch, name="device activity", daemon=True)

    def on_start(self, step: int) -> None:
        """Begin to watch."""
        self._thread.start()

    def on_step(self, end: StepEnd) -> None:
        """Hand over what was read since the last step."""
        end.values.update({f"device/{name}": value for name, value in self.taken().items()})

    def taken(self) -> Mapping[str, float]:
        """What was read since this was last asked for."""
        newest, self._newest = self._newest, {}
        return newest

    def close(self) -> None:
        """Stop watching; a reading in progress is not waited for."""
        self._ended.set()

    def _watch(self) -> None:
        while self._readings and not self._ended.is_set():
            self._newest = {name: value for read in list(self._readings) for name, value in self._read(read).items()}
            self._ended.wait(self._every_s)

    def _read(self, read: Reading) -> Mapping[str, float]:
        try:
            return read()
        except (RunnerError, RuntimeError, OSError, ValueError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            log.warning("some of the device's load (device/…) is not recorded: %s", reason)
            self._readings.remove(read)
            return {}
