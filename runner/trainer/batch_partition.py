"""A mini-batch dealt out to the data ranks, and what each of them computed brought back into one.

    units ──balanced by tokens──▶ a hand for each rank ──cut by token budget──▶ micro-batches, as many on every rank
    outputs of each rank's units ──gathered──▶ outputs of the whole batch, in its order, on every rank

Every rank has the whole batch and deals in the same way, so nothing is exchanged for it. A rank that has fewer
micro-batches than another runs fillers, which teach nothing: models that gather their weights for a pass need all ranks
to make as many passes.

Legend: N rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from runner.core.batch import Batch, Places, cuts, join, places, unit_spans
from runner.distributed.pipeline_schedule import UNDIVIDED
from runner.distributed.work_partition import balanced
from runner.interfaces import Outputs, Peers, Stage


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
