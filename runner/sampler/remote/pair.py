"""Rank 0 and one sampler in a process group of two: files go through it in pieces, and none is waited for for ever.

rank 0   file ──mapped──▶ piece ──▶ card ══broadcast══▶ card ──▶ piece ──mapped──▶ the sampler's memory
                            └──── on the CPU (gloo): out of the file itself, into memory itself ────┘

A group is known to these two alone: with a sampler that is lost or replaced nothing ends but its own pair.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import cycle
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from runner.core.errors import OutOfMemory
from runner.sampler.remote.backends import FORM_S, STALL_S, Collectives, ended, group_of

T = TypeVar("T")
PIECE_BYTES = 64 << 20  # of a file that one broadcast takes; two are under way
POLL_S = 2e-4

Alive = Callable[[], None]  # raises OSError where the other side is gone


class Stage:
    """Where a piece is on its way to or from a card: pinned memory and the card's, on a stream beside the trainer's."""

    def __init__(self, device: torch.device) -> None:
        self.module: Any = torch.get_device_module(device)
        self.stream = self.module.Stream(device)
        self.staged = torch.empty(PIECE_BYTES, dtype=torch.uint8, device=device)
        self.pinned = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True)


Stages = Sequence[Stage | None]  # one for each piece that is under way; the CPU needs none


def stages_on(device: torch.device) -> Stages:
    """Those of one transfer at a time. Raises OutOfMemory."""
    if device.type == "cpu":
        return None, None
    try:
        with _current(device):
            return Stage(device), Stage(device)
    except RuntimeError as error:  # that of pinned memory is of no kind of its own
        if "out of memory" not in str(error):
            raise
        need = f"{2 * PIECE_BYTES >> 20} MiB on {device} and as much pinned memory"
        raise OutOfMemory(
            f"weights cannot go by collective, which takes {need}: {_first_line(error)}\n"
            "  sampler.weight_transfer_backend=http takes neither"
        ) from error


class Pair:
    """One side of it, for one thread at a time; after an error it is only good to be given up."""

    def __init__(self, collectives: Collectives, rank: int, store: Callable[[], Any], own: str, stages: Stages) -> None:
        """Wait for the other side, at most FORM_S.

        rank: 0 sends, 1 receives; store: makes that of the two (`backends`); own: the address of this machine towards
        the other; stages: those on the device, which pairs may share that never move anything at once. Raises OSError.
        """
        self._device = collectives.device
        self._group: Any = None
        self._given_up = False
        self._lanes = [_Lane(stage, sends=rank == 0) for stage in stages]

        def form() -> None:
            with _current(self._device):
                self._group = group_of(collectives, store(), rank, own)
                if self._given_up:
                    return self.give_up()  # nobody else knows of this group
                _settle(self._broadcast(torch.zeros(1, dtype=torch.uint8, device=self._device)), lambda: None, FORM_S)

        try:
            _in_time(form, FORM_S)
        except BaseException:
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
        self._given_up = True
        group, self._group = self._group, None
        works = [lane.work for lane in self._lanes if lane.work is not None]
        self._lanes.clear()
        if group is not None:
            threading.Thread(target=ended, args=(group, works), name="pair", daemon=True).start()

    def _broadcast(self, tensor: Tensor) -> Any:
        options = distributed.BroadcastOptions()
        options.rootRank = 0
        options.asyncOp = True
        signed = tensor.view(torch.int8)  # of the types of one byte the one that HCCL documents
        return _told(lambda: self._group.broadcast([signed], options))


class _Lane:
    """A piece on its way."""

    def __init__(self, stage: Stage | None, *, sends: bool) -> None:
        self.work: Any = None
        self._piece: Tensor | None = None
        self._stage, self._sends = stage, sends

    def begin(self, piece: Tensor, broadcast: Callable[[Tensor], Any]) -> None:
        """Put it on its way."""
        self._piece, stage = piece, self._stage
        if stage is None:
            self.work = broadcast(piece)
            return
        with stage.module.stream(stage.stream):
            moved, pinned = stage.staged[: len(piece)], stage.pinned[: len(piece)]
            if self._sends:
                moved.copy_(pinned.copy_(piece), non_blocking=True)
            self.work = broadcast(moved)

    def settle(self, alive: Alive) -> None:
        """Wait until what is on its way is there."""
        if self.work is None or self._piece is None:
            return
        _settle(self.work, alive, STALL_S)
        stage = self._stage
        if stage is not None and not self._sends:
            pinned = stage.pinned[: len(self._piece)]
            with stage.module.stream(stage.stream):
                pinned.copy_(stage.staged[: len(pinned)], non_blocking=True)
            stage.stream.synchronize()
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
    """What it gives; what a library raises, as OSError of one line, but for memory that is exhausted."""
    try:
        return work()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise ConnectionError(_first_line(error)) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


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
