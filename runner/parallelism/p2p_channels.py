"""What passes between neighbouring stages: hidden states one way, their gradients the other way, without a number.

    stage 0 ──hidden──▶ stage 1 ──hidden──▶ stage 2        (──▶ stage 0, where stages have several runs of layers)
            ◀─gradient─         ◀─gradient─

Each direction of each border is a process group of its own two ranks: messages of one kind come in the order in which
they were sent, and no message waits for one of another kind, which a communicator that is shared would have them do.
Both sides know shape and type; sending returns at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, distributed

from runner.parallelism.mesh import Family


@dataclass(slots=True)
class Way:
    """One direction of a border, as one of its two ranks sees it.

    room: how many messages may be under way; a sender with more waits for the oldest to be taken
    """

    group: Any
    room: int
    pending: deque[tuple[Any, Tensor]] = field(default_factory=deque)  # tensors live until they were sent

    @property
    def _other(self) -> int:
        return 1 - distributed.get_rank(self.group)

    def send(self, tensor: Tensor) -> None:
        """Let it go; its memory must not change afterwards."""
        while self.pending and (self.pending[0][0].is_completed() or len(self.pending) >= self.room):
            work, _ = self.pending.popleft()
            work.wait()
        tensor = tensor.detach().contiguous()
        self.pending.append((distributed.isend(tensor, group=self.group, group_dst=self._other), tensor))

    def receive(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """The next one that was sent."""
        tensor = torch.empty(shape, dtype=dtype, device=device)
        distributed.recv(tensor, group=self.group, group_src=self._other)
        return tensor


@dataclass(frozen=True, slots=True)
class Border:
    """Between a stage and the next one."""

    hidden: Way
    gradients: Way


@dataclass(frozen=True, slots=True)
class Borders:
    """Those of one stage: to the one before it and to the one after it. None at the ends."""

    before: Border | None
    after: Border | None

    def warm_up(self, device: torch.device) -> None:
        """One number each way, so that what is wrong between the ranks is known now. All stages call it."""
        one = torch.ones(1, device=device)
        if self.after is not None:
            self.after.hidden.send(one)
        if self.before is not None:
            self.before.gradients.send(one)
            self.before.hidden.receive([1], one.dtype, device)
        if self.after is not None:
            self.after.gradients.receive([1], one.dtype, device)


def made(families: Sequence[Family], chunks: int, new_group: Callable[[list[int]], Any]) -> Borders:
    """Make the groups between the stages of each of `families`, on all ranks in the same order, and return those of
    this rank. Collective.

    chunks: runs of layers on each rank; with several the last stage hands on to the first
    """
    rank, room = distributed.get_rank(), 2 * len(families[0]) * chunks
    before: Border | None = None
    after: Border | None = None
    for family in families:
        for left, right in _neighbours(family, chunks > 1):
            border = Border(*(Way(new_group([left, right]), room) for _ in range(2)))
            after = border if rank == left else after
            before = border if rank == right else before
    return Borders(before, after)


def _neighbours(family: Family, ring: bool) -> Iterator[tuple[int, int]]:
    yield from pairwise(family)
    if ring:
        yield family[-1], family[0]
