"""The order in which one rank runs the forward and backward passes of a mini-batch's micro-batches.

    one stage                F0 B0 F1 B1 F2 B2 …
    1F1B, stage 0 of 2       F0 F1 B0 F2 B1 …            (Narayanan et al., 2104.04473, section 2.2.1)
    interleaved, 2 chunks    F0 F1 F0' F1' F2 B0' …      (section 2.2.2)

A rank waits for what another one has to send, and for nothing else: the order alone makes the schedule. Micro-batches
take turns in groups of as many as there are stages; the last group may be smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from runner.interfaces.learning import Turn


def pipelined(rank: int, stages: int, chunks: int, count: int) -> list[Turn]:
    """The turns of stage `rank` for `count` micro-batches: 1F1B, interleaved where it has several chunks of layers.

    At any time at most `in_flight` forward passes wait for their backward pass. The paper wants a count that the stages
    divide where there are chunks: here the order is that of the next such count, with the passes left out that are not.
    """
    filled = count if chunks == 1 else -(-count // stages) * stages
    forward, backward = forwards(stages, chunks, filled), _backwards(stages, chunks, filled)
    ahead = min(in_flight(rank, stages, chunks), len(forward))
    turns = forward[:ahead]
    for at, one in enumerate(backward):
        turns += [one, *forward[ahead + at : ahead + at + 1]]
    return [turn for turn in turns if turn.micro < count]


def in_flight(rank: int, stages: int, chunks: int) -> int:
    """How many forward passes stage `rank` makes before its first backward pass, if there are so many."""
    if chunks == 1:
        return stages - rank
    return 2 * (stages - rank - 1) + (chunks - 1) * stages + 1


def forwards(stages: int, chunks: int, count: int) -> list[Turn]:
    """The forward passes alone, in the order of `pipelined`, and the same on each stage."""
    groups = [range(first, min(first + stages, count)) for first in range(0, count, stages)]
    return [Turn(micro, chunk) for group in groups for chunk in range(chunks) for micro in group]


def _backwards(stages: int, chunks: int, count: int) -> list[Turn]:
    return [Turn(micro, chunks - 1 - chunk, backward=True) for micro, chunk, _ in forwards(stages, chunks, count)]


class Undivided:
    """The stage of a model whose layers are all on this rank: see `runner.interfaces.Stage`."""

    ends = True
    depth = 0
    stages = 1
    elsewhere: frozenset[Any] = frozenset()

    def turns(self, count: int) -> Sequence[Turn]:
        """Forward and backward, one micro-batch after the other."""
        return [turn for micro in range(count) for turn in (Turn(micro), Turn(micro, backward=True))]

    def flow(self, count: int) -> Sequence[Turn]:
        """One after the other."""
        return [Turn(micro) for micro in range(count)]

    def enter(self, turn: Turn) -> None:
        """There is one run of layers."""

    def tied(self) -> list[Tensor]:
        """No other rank has another end of the model."""
        return []

    def settle(self) -> None:
        """All parameters are here."""

    def passed(self, run: Callable[[Callable[..., Any]], Tensor], forward: Callable[..., Any]) -> Tensor:
        """All layers."""
        return run(forward)


UNDIVIDED = Undivided()
