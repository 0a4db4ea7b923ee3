"""Work shared out to ranks that all know all of it, so that nothing is exchanged but what came of it.

    costs        ──balanced──▶ the rank of each ──together──▶ each rank does its own ──▶ every result, on every rank
    a mini-batch ──units, balanced by tokens──▶ a hand for each rank ──cut by token budget──▶ micro-batches
    outputs of each rank's units ──gathered──▶ outputs of the whole batch, in its order, on every rank

Every rank has the whole batch and deals in the same way. All have as many micro-batches: a rank that has fewer runs
fillers, which teach nothing, because models that gather their weights for a pass need all ranks to make as many passes.

Pipeline stages make the passes of their micro-batches, forward F and backward B, in one of these orders:

    one stage                F0 B0 F1 B1 F2 B2 …
    1F1B, stage 0 of 2       F0 F1 B0 F2 B1 …            (Narayanan et al., 2104.04473, section 2.2.1)
    interleaved, 2 chunks    F0 F1 F0' F1' F2 B0' …      (section 2.2.2)

A rank waits for what another one has to send, and for nothing else: the order alone makes the schedule. Micro-batches
take turns in groups of as many as there are stages; the last group may be smaller.

Legend: N rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from runner.core.batch import Batch, Places, cuts, join, places, unit_spans
from runner.core.errors import OutOfMemory, RunnerError
from runner.distributed.dtensor_utils import added_up, local, total_norm
from runner.interfaces import Outputs, Peers, Request, Stage
from runner.interfaces.learning import Turn

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


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of a batch.

    micros: of its own units; fillers: how many passes others make beyond; filler: the batch's smallest unit
    order: for each rank, in order, the spans (first row, row after the last, first token, token after it) of its units
    """

    micros: Sequence[Batch]
    fillers: int
    filler: Batch
    order: Sequence[tuple[int, int, int, int]]

    def __iter__(self) -> Iterator[tuple[Batch, bool]]:
        """Each micro-batch that this rank runs, and whether it is one of its own."""
        yield from ((micro, True) for micro in self.micros)
        yield from ((self.filler, False) for _ in range(self.fillers))

    def gathered(self, peers: Peers, outputs: Outputs) -> dict[str, Tensor]:
        """What all ranks computed, [T] or [N], of what each did on its own units end to end."""
        found = peers.gather_tensors(outputs)
        joined = {name: torch.cat([one[name] for one in found]) for name in found[0]}
        return {name: values[self._places(len(values)).to(values.device)] for name, values in joined.items()}

    def _places(self, size: int) -> Tensor:
        """Where in the ranks' outputs, laid end to end, each token's or row's value stands."""
        if not size:  # of a stage that hands all on to another
            return torch.arange(0)
        per_token = size == sum(last - first for *_, first, last in self.order)
        spans = [span[2:] if per_token else span[:2] for span in self.order]
        return torch.argsort(torch.cat([torch.arange(*span) for span in spans]))


def deal(batch: Batch, budget: int, peers: Peers, *, padded: bool) -> Share:
    """This rank's share of a batch, in micro-batches that take at most `budget` places (see `micro_batches`)."""
    spans = unit_spans(batch)
    sizes = [size for *_, size in spans]
    taken = places(batch) if padded else [Places(size) for size in sizes]
    owners = balanced(sizes, peers.size)
    hands = [[unit for unit, owner in enumerate(owners) if owner == rank] for rank in range(peers.size)]
    cut = [cuts([taken[unit] for unit in hand], budget, padded=padded) for hand in hands]
    mine = hands[peers.rank]
    micros = [_taken(batch, spans, [mine[at] for at in run]) for run in cut[peers.rank]]
    ends = list(accumulate(sizes))
    order = [(*spans[unit][:2], ends[unit] - sizes[unit], ends[unit]) for hand in hands for unit in hand]
    smallest = min(range(len(sizes)), key=sizes.__getitem__)
    return Share(micros, max(map(len, cut)) - len(micros), _taken(batch, spans, [smallest]), order)


def spread(
    batch: Batch,
    run: Callable[[Batch], Mapping[str, Tensor]],
    budget: int,
    peers: Peers,
    *,
    padded: bool,
    stage: Stage = UNDIVIDED,
) -> dict[str, Tensor]:
    """What `run` makes of micro-batches, [T] or [N], of the whole batch on every rank.

    stage: which of the model's layers are here; only where they end does `run` make anything
    """
    share = deal(batch, budget, peers, padded=padded)
    micros, found = list(share), dict[int, Mapping[str, Tensor]]()
    for turn in stage.flow(len(micros)):
        stage.enter(turn)
        micro, own = micros[turn.micro]
        found[turn.micro] = own_part(run(micro), own)  # the last run of layers has the last word
    return share.gathered(peers, joined([found[at] for at in range(len(micros))]))


def own_part(outputs: Mapping[str, Tensor], own: bool) -> Mapping[str, Tensor]:
    """The outputs of a micro-batch; none of a filler's, in their shapes and types."""
    return outputs if own else {name: values[:0] for name, values in outputs.items()}


def joined(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The outputs of micro-batches end to end."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _taken(batch: Batch, spans: Sequence[tuple[int, int, int]], units: Sequence[int]) -> Batch:
    """Some units of a batch, in its order; a view where they are neighbours."""
    edges = [at for at in range(1, len(units)) if units[at] != units[at - 1] + 1]
    runs = [units[a:b] for a, b in zip([0, *edges], [*edges, len(units)], strict=True)]
    parts = [batch.slice_rows(spans[run[0]][0], spans[run[-1]][1]) for run in runs]
    return parts[0] if len(parts) == 1 else join(parts)
