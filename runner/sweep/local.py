"""Jobs on this machine: processes below this one, which end with it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from runner.sweep.config import SweepConfig
from runner.sweep.need import Need
from runner.sweep.order import Order
from runner.sweep.process import JobProcess, end_orphan
from runner.sweep.site import Handle, Identity, Say
from runner.sweep.slots import Slots, cards_here, environment

POLL_S = 0.05


@contextmanager
def opened(options: SweepConfig) -> Iterator[Local]:
    """This machine."""
    yield Local(options.parallel)


class Local:
    """This machine, whose cores and cards are handed out to jobs. `limit`: jobs at once; None: as many as fit."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._needs: list[Need] = []
        self._slots = Slots([], None)

    @property
    def cards(self) -> tuple[str, ...]:
        return cards_here()

    @property
    def parallel(self) -> int:
        return self._slots.parallel

    def admit(self, needs: Iterable[Need]) -> None:
        self._needs = list(needs)
        self._slots = Slots(self._needs, self._limit)

    def describe(self) -> str:
        return self._slots.describe(self._needs)

    def has_room(self, need: Need) -> bool:
        return self._slots.has_room(need)

    def start(self, need: Need, order: Order) -> Handle:
        devices = self._slots.acquire(need)
        assert devices is not None, "the engine asks for room first"
        return LocalJob(self._slots, need, devices, order)

    def take_up(self, left: Mapping[int, Identity], grace_s: float, say: Say) -> Mapping[int, Handle]:
        """None of them goes on: they got SIGTERM when their sweep died, and are waited for, then killed."""
        alive = {index: (job["pid"], job["started"]) for index, job in left.items() if "pid" in job}
        deadline, told = time.monotonic() + grace_s, False
        while alive := {i: p for i, p in alive.items() if end_orphan(p, 0 if time.monotonic() < deadline else 9)}:
            if not told:
                say(f"waiting for job {', '.join(map(str, alive))} of the sweep before, which is saving")
                told = True
            time.sleep(POLL_S)
        return {}


class LocalJob:
    """A process of this machine and what it holds."""

    def __init__(self, slots: Slots, need: Need, devices: tuple[str, ...], order: Order) -> None:
        self._slots, self._need, self.devices = slots, need, devices
        self._holds = True
        cores = devices if need.kind == "core" else ()
        variables = {**order.environment, **environment(need, devices)}
        self._process = JobProcess(order.command, Path(order.log), variables, cores, order.place)
        self._began = time.monotonic()

    @property
    def identity(self) -> Identity:
        process = self._process.identity
        return {} if process is None else {"pid": process[0], "started": process[1]}

    @property
    def told(self) -> None:
        """Its exit code says all."""
        return None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def poll(self) -> int | None:
        code = self._process.poll()
        if code is not None and self._holds:
            self._holds = False
            self._slots.release(self._need, self.devices)
        return code

    def signal(self, number: int) -> None:
        self._process.signal(number)
