"""A checkpoint that is written while training goes on: from a copy, in a thread, one at a time.

tensors ──copied──▶ host memory, kept from save to save ──thread──▶ disk
   └─ training goes on changing them
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from threading import Thread

import torch
from torch import Tensor

from runner.checkpoint.tensors import Piece
from runner.errors import OutOfMemory

Pieces = Mapping[str, Mapping[str, Piece]]


class HostCopy:
    """Room in the host's memory for all that this rank writes, pinned where it comes from an accelerator."""

    def __init__(self) -> None:
        self._room: dict[tuple[str, str], Tensor] = {}

    def taken(self, pieces: Pieces) -> Pieces:
        """The same pieces as they are now; the copy before this one is overwritten. Raises OutOfMemory."""
        room: dict[tuple[str, str], Tensor] = {}
        for section, held in pieces.items():
            for name, piece in held.items():
                room[section, name] = self._like(piece.values, self._room.get((section, name)))
        self._room = room  # what is no longer there is let go
        for section, held in pieces.items():
            for name, piece in held.items():
                room[section, name].copy_(piece.values, non_blocking=True)
        if any(piece.values.device.type != "cpu" for held in pieces.values() for piece in held.values()):
            torch.accelerator.synchronize()
        return {s: {n: replace(one, values=room[s, n]) for n, one in held.items()} for s, held in pieces.items()}

    def _like(self, values: Tensor, kept: Tensor | None) -> Tensor:
        if kept is not None and (kept.shape, kept.dtype) == (values.shape, values.dtype):
            return kept
        try:
            return torch.empty(values.shape, dtype=values.dtype, pin_memory=values.device.type != "cpu")
        except (RuntimeError, MemoryError) as error:
            raise OutOfMemory(
                f"no host memory for a copy of what is saved: {str(error).splitlines()[0]}\n"
                "  checkpoint.asynchronous=false writes without one, and training waits for it"
            ) from error


class Flight:
    """One write on its way, of the checkpoint of `step`."""

    def __init__(self, step: int, work: Callable[[], object]) -> None:
        self.step = step
        self._work, self._error = work, list[BaseException]()
        self._thread = Thread(target=self._run, name="checkpoint writer", daemon=True)
        self._thread.start()

    @property
    def landed(self) -> bool:
        """Whether it is over, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Until it is over. Raises what went wrong."""
        self._thread.join()
        if self._error:
            raise self._error[0]

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # whoever waits raises it
            self._error.append(error)
