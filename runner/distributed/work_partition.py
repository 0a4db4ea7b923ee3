"""Work shared out to ranks that all know all of it, so that nothing is exchanged but what came of it.

costs ──balanced──▶ the rank of each ──together──▶ each rank does its own ──▶ every result, on every rank
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from runner.core.errors import OutOfMemory, RunnerError
from runner.distributed.dtensor_utils import added_up, local, total_norm
from runner.interfaces import Peers, Request

T = TypeVar("T")


class Alone:
    """The `Peers` of a single process."""

    rank = 0
    size = 1

    def gather(self, value: T) -> list[T]:
        """What this process gave."""
        return [value]

    def gather_tensors(self, tensors: Mapping[str, Tensor]) -> list[Mapping[str, Tensor]]:
        """What this process gave."""
        return [tensors]

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Nothing to add."""

    def from_first_(self, tensor: Tensor) -> None:
        """It is the first's already."""


ALONE = Alone()


def balanced(costs: Sequence[int], ranks: int) -> list[int]:
    """The rank of each piece of work: the costliest first, each to the rank that has least so far.

    What the ranks have differs by at most the costliest piece, and is the same for any order of the pieces.
    """
    loads, owners = [0] * ranks, [0] * len(costs)
    for piece in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owners[piece] = min(range(ranks), key=loads.__getitem__)
        loads[owners[piece]] += costs[piece]
    return owners


def grouped(requests: Sequence[Request]) -> tuple[list[list[int]], list[int]]:
    """The places of requests that share a prompt, group by group, and what each group costs: its tokens at most."""
    groups: dict[int, list[int]] = {}
    for at, request in enumerate(requests):
        groups.setdefault(request.group, []).append(at)
    members = list(groups.values())
    return members, [
        len(requests[group[0]].prompt) + sum(requests[at].max_new_tokens for at in group) for group in members
    ]


@dataclass(frozen=True, slots=True)
class Failed:
    """What a rank hands over in place of its results: what it raised, in words, and the exit code of that."""

    words: str
    exit_code: int

    @classmethod
    def of(cls, error: Exception, rank: int) -> Failed:
        """What `rank` raised."""
        known = isinstance(error, RunnerError)
        text = str(error) if known else f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        full = isinstance(error, torch.OutOfMemoryError)
        return cls(f"rank {rank}: {text}", OutOfMemory.exit_code if full else getattr(error, "exit_code", 1))

    def error(self) -> RunnerError:
        """As the other ranks raise it."""
        error = RunnerError(self.words)
        error.exit_code = self.exit_code
        return error


def together(peers: Peers, owners: Sequence[int], work: Callable[[list[int]], Sequence[T]]) -> list[T]:
    """What `work` makes of pieces 0 … n-1, in their order, each done by the rank in `owners`.

    work: the numbers of this rank's pieces → what each of them gives; not called without one. What it raises on one
    rank is raised on all, elsewhere as a RunnerError of the same exit code that names the rank.
    """
    mine = [piece for piece, owner in enumerate(owners) if owner == peers.rank]
    given: Sequence[T] | Failed = []
    try:
        if mine:
            given = work(mine)
    except Exception as error:
        peers.gather(Failed.of(error, peers.rank))
        raise
    results = peers.gather(given)
    if failed := [one for one in results if isinstance(one, Failed)]:
        raise failed[0].error()
    queues = [iter(one) for one in results if not isinstance(one, Failed)]
    return [next(queues[owner]) for owner in owners]


def on_first(peers: Peers, work: Callable[[], T]) -> T:
    """What `work` gives on rank 0, on every rank; or what it raises there. The others wait for it."""
    return together(peers, [0], lambda _: [work()])[0]


def each(peers: Peers, work: Callable[[], object]) -> None:
    """Do what every rank has its part in; what it raises on one rank is raised on all, as by `together`."""

    def mine(_: list[int]) -> list[None]:
        work()
        return [None]

    together(peers, range(peers.size), mine)


def sum_gradients(parameters: Sequence[nn.Parameter], peers: Peers) -> None:
    """Add the ranks' gradients, in place; those of parameters in pieces on them were added in the backward pass."""
    add_gradients([p for p in parameters if not added_up(p)], peers)


def add_gradients(parameters: Sequence[nn.Parameter], peers: Peers) -> None:
    """Add the ranks' gradients of what each of them holds of the parameters, in place."""
    peers.sum_([local(p.grad) for p in reached(parameters, peers) if p.grad is not None])


def reached(parameters: Sequence[nn.Parameter], peers: Peers) -> list[nn.Parameter]:
    """Those that some rank has a gradient of; where it has none it is zero from here on.

    A parameter that no rank has a gradient of stays without one, so that the optimizer leaves it alone as it does in
    one process.
    """
    ranks = peers.gather([p.grad is not None for p in parameters])
    found = [p for p, *had in zip(parameters, *ranks, strict=True) if any(had)]
    for parameter in found:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return found


@dataclass(frozen=True, slots=True)
class Summed:
    """The gradients of a model that each of these ranks has as a whole, or in pieces over all of them."""

    peers: Peers

    def add(self, parameters: Sequence[nn.Parameter]) -> None:
        """See `Gradients`."""
        sum_gradients(parameters, self.peers)

    def norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """See `Gradients`."""
        return total_norm([p.grad for p in parameters if p.grad is not None])
