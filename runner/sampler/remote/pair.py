"""Rank 0 and one sampler in a process group of two: files go through it in pieces, and none is waited for for ever.

rank 0   file ──mapped──▶ piece ──▶ card ══broadcast══▶ card ──▶ piece ──mapped──▶ the sampler's memory
                            └──── on the CPU (gloo): out of the file itself, into memory itself ────┘

A group is known to these two alone: with a sampler that is lost or replaced nothing ends but its own pair.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import cycle
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from runner.sampler.remote.backends import FORM_S, STALL_S, Collectives, ended, group_of

T = TypeVar("T")
PIECE_BYTES = 64 << 20  # of a file that one broadcast takes; two are under way
POLL_S = 2e-4

Alive = Callable[[], None]  # raises OSError where the other side is gone


class Pair:
    """One side of it, for one thread at a time; after an error it is only good to be given up."""

    def __init__(self, collectives: Collectives, rank: int, store: Callable[[], Any], own: str) -> None:
        """Wait for the other side, at most FORM_S.

        rank: 0 sends, 1 receives; store: makes that of the two (`backends`); own: the address of this machine towards
        the other. Raises OSError.
        """
        self._device = collectives.device
        self._group: Any = None
        self._lanes: list[_Lane] = []

        def form() -> None:
            with _current(self._device):
                self._group = group_of(collectives, store(), rank, own)
                self._lanes = [_Lane(self._device, sends=rank == 0) for _ in range(2)]
                _settle(self._broadcast(torch.zeros(1, dtype=torch.uint8, device=self._device)), lambda: None, FORM_S)

        try:
            _in_time(form, FORM_S)
        except OSError:
            self.give_up()
            raise

    def move(self, content: Tensor, alive: Alive) -> None:
        """Send `content`, uint8 [n] of the host, or receive it, until it is there. Raises OSError."""
        with _current(self._device):
            for piece, lane in zip(content.split(PIECE_BYTES), cycle(self._lanes), strict=False):
                lane.settle(alive)
                lane.begin(piece, self._broadcast)
            for lane in self._lanes:
                lane.settle(alive)

    def give_up(self) -> None:
        """End it, whatever is under way: behind the caller's back, as a library may take its time for that."""
        group, self._group = self._group, None
        works = [lane.work for lane in self._lanes if lane.work is not None]
        self._lanes.clear()
        if group is not None:
            threading.Thread(target=ended, args=(group, works), name="pair", daemon=True).start()

    def _broadcast(self, tensor: Tensor) -> Any:
        options = distributed.BroadcastOptions()
        options.rootRank = 0
        options.asyncOp = True
        return _told(lambda: self._group.broadcast([tensor], options))


class _Lane:
    """Where a piece is on its way: for a card in pinned memory and on the card, on a stream beside the trainer's."""

    def __init__(self, device: torch.device, *, sends: bool) -> None:
        self.work: Any = None
        self._piece: Tensor | None = None
        self._sends, self._module = sends, None if device.type == "cpu" else torch.get_device_module(device)
        if self._module is not None:
            self._stream = self._module.Stream(device)
            self._staged = torch.empty(PIECE_BYTES, dtype=torch.uint8, device=device)
            self._pinned = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True)

    def begin(self, piece: Tensor, broadcast: Callable[[Tensor], Any]) -> None:
        """Put it on its way."""
        self._piece, moved = piece, piece
        if self._module is None:
            self.work = broadcast(moved)
            return
        with self._module.stream(self._stream):
            moved, pinned = self._staged[: len(piece)], self._pinned[: len(piece)]
            if self._sends:
                moved.copy_(pinned.copy_(piece), non_blocking=True)
            self.work = broadcast(moved)

    def settle(self, alive: Alive) -> None:
        """Wait until what is on its way is there."""
        if self.work is None or self._piece is None:
            return
        _settle(self.work, alive, STALL_S)
        if self._module is not None and not self._sends:
            pinned = self._pinned[: len(self._piece)]
            with self._module.stream(self._stream):
                pinned.copy_(self._staged[: len(pinned)], non_blocking=True)
            self._stream.synchronize()
            self._piece.copy_(pinned)
        self.work = self._piece = None


def _settle(work: Any, alive: Alive, within_s: float) -> None:
    """Wait for it, as long as the other side is there. Raises OSError."""
    end = time.monotonic() + within_s
    while not _told(work.is_completed):
        alive()
        if time.monotonic() > end:
            raise TimeoutError(f"nothing has moved for {within_s:g} s")
        time.sleep(POLL_S)
    _told(work.wait)


def _told(work: Callable[[], T]) -> T:
    """What it gives; what a library raises, as OSError of one line."""
    try:
        return work()
    except RuntimeError as error:
        raise ConnectionError((str(error).splitlines() or [type(error).__name__])[0]) from error


def _in_time(work: Callable[[], None], within_s: float) -> None:
    """Do it in a thread, which is left to itself where it takes longer. Raises OSError."""
    found: list[BaseException | None] = []

    def do() -> None:
        try:
            _told(work)
            found.append(None)
        except OSError as error:
            found.append(ConnectionError(str(error)))  # one without frames, in which half a group would live on
        except BaseException as error:  # a bug, raised where it is waited for
            found.append(error)

    thread = threading.Thread(target=do, name="pair", daemon=True)
    thread.start()
    thread.join(within_s)
    if not found:
        raise TimeoutError(f"no group in {within_s:g} s")
    if found[0] is not None:
        raise found[0]


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """The device as the one that this thread uses; a thread begins with the first one."""
    if device.type == "cpu":
        return nullcontext()
    found: AbstractContextManager[Any] = torch.get_device_module(device).device(device)
    return found
