"""Work shared out to ranks that all know all of it, so that nothing is exchanged but what came of it.

    costs        ──balanced──▶ the rank of each ──together──▶ each rank does its own ──▶ every result, on every rank
    a mini-batch ──units, balanced by tokens──▶ a hand for each rank ──cut by token budget──▶ micro-batches
    outputs of each rank's units ──gathered──▶ outputs of the whole batch, in its order, on every rank

Every rank has the whole batch and deals in the same way. All have as many micro-batches: a rank that has fewer runs
fillers, which teach nothing, because models that gather their weights for a pass need all ranks to make as many passes.

Legend: N rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from runner.core.batch import Batch, Footprint, concat_batches, footprints, micro_batch_ranges, unit_spans
from runner.core.errors import OutOfMemory, RunnerError
from runner.distributed.dtensor_utils import is_reduced_in_backward, local_tensor, total_norm
from runner.interfaces import Outputs, PipelineStage, RankCollectives, Request
from runner.interfaces.learning import PipelineOp

T = TypeVar("T")


class SingleProcess:
    """The `RankCollectives` of a single process."""

    rank = 0
    size = 1

    def all_gather(self, value: T) -> list[T]:
        """What this process gave."""
        return [value]

    def all_gather_tensors(self, tensors: Mapping[str, Tensor]) -> list[Mapping[str, Tensor]]:
        """What this process gave."""
        return [tensors]

    def all_reduce_(self, tensors: Sequence[Tensor]) -> None:
        """Nothing to add."""

    def broadcast_(self, tensor: Tensor) -> None:
        """It is the first's already."""


SINGLE_PROCESS = SingleProcess()


def balance_by_cost(costs: Sequence[int], ranks: int) -> list[int]:
    """The rank of each piece of work: the costliest first, each to the rank that has least so far.

    What the ranks have differs by at most the costliest piece, and is the same for any order of the pieces.
    """
    loads, owners = [0] * ranks, [0] * len(costs)
    for piece in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owners[piece] = min(range(ranks), key=loads.__getitem__)
        loads[owners[piece]] += costs[piece]
    return owners


def group_by_prompt(requests: Sequence[Request]) -> tuple[list[list[int]], list[int]]:
    """Indices of requests that share a prompt, by group, and the cost of each group: its maximum tokens."""
    groups: dict[int, list[int]] = {}
    for at, request in enumerate(requests):
        groups.setdefault(request.group, []).append(at)
    members = list(groups.values())
    return members, [
        len(requests[group[0]].prompt) + sum(requests[at].max_new_tokens for at in group) for group in members
    ]


@dataclass(frozen=True, slots=True)
class RemoteFailure:
    """What a rank sends instead of its results: the text of its exception, and its exit code."""

    message: str
    exit_code: int

    @classmethod
    def from_error(cls, error: Exception, rank: int) -> RemoteFailure:
        """What `rank` raised."""
        known = isinstance(error, RunnerError)
        text = str(error) if known else f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        full = isinstance(error, torch.OutOfMemoryError)
        return cls(f"rank {rank}: {text}", OutOfMemory.exit_code if full else getattr(error, "exit_code", 1))

    def to_error(self) -> RunnerError:
        """As the other ranks raise it."""
        error = RunnerError(self.message)
        error.exit_code = self.exit_code
        return error


def run_partitioned(peers: RankCollectives, owners: Sequence[int], work: Callable[[list[int]], Sequence[T]]) -> list[T]:
    """What `work` makes of pieces 0 … n-1, in their order, each done by the rank in `owners`.

    work: the numbers of this rank's pieces → what each of them gives; not called without one. What it raises on one
    rank is raised on all, elsewhere as a RunnerError of the same exit code that names the rank.
    """
    mine = [piece for piece, owner in enumerate(owners) if owner == peers.rank]
    given: Sequence[T] | RemoteFailure = []
    try:
        if mine:
            given = work(mine)
    except Exception as error:
        peers.all_gather(RemoteFailure.from_error(error, peers.rank))
        raise
    results = peers.all_gather(given)
    if failed := [one for one in results if isinstance(one, RemoteFailure)]:
        raise failed[0].to_error()
    queues = [iter(one) for one in results if not isinstance(one, RemoteFailure)]
    return [next(queues[owner]) for owner in owners]


def run_on_rank0(peers: RankCollectives, work: Callable[[], T]) -> T:
    """What `work` gives on rank 0, on every rank; or what it raises there. The others wait for it."""
    return run_partitioned(peers, [0], lambda _: [work()])[0]


def run_on_all(peers: RankCollectives, work: Callable[[], object]) -> None:
    """Do what every rank has its part in; what it raises on one rank is raised on all, as by `together`."""

    def mine(_: list[int]) -> list[None]:
        work()
        return [None]

    run_partitioned(peers, range(peers.size), mine)


def sum_gradients(parameters: Sequence[nn.Parameter], peers: RankCollectives) -> None:
    """Sum the ranks' gradients in place; those of sharded parameters were summed in the backward pass."""
    add_gradients([p for p in parameters if not is_reduced_in_backward(p)], peers)


def add_gradients(parameters: Sequence[nn.Parameter], peers: RankCollectives) -> None:
    """Add the ranks' gradients of what each of them holds of the parameters, in place."""
    peers.all_reduce_([local_tensor(p.grad) for p in fill_missing_gradients(parameters, peers) if p.grad is not None])


def fill_missing_gradients(parameters: Sequence[nn.Parameter], peers: RankCollectives) -> list[nn.Parameter]:
    """Those that some rank has a gradient of; where it has none it is zero from here on.

    A parameter that no rank has a gradient of stays without one, so that the optimizer leaves it alone as it does in
    one process.
    """
    ranks = peers.all_gather([p.grad is not None for p in parameters])
    found = [p for p, *had in zip(parameters, *ranks, strict=True) if any(had)]
    for parameter in found:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return found


@dataclass(frozen=True, slots=True)
class AllReduceGradients:
    """The gradients of a model that each of these ranks has as a whole, or in pieces over all of them."""

    peers: RankCollectives

    def all_reduce_(self, parameters: Sequence[nn.Parameter]) -> None:
        """See `GradientReducer`."""
        sum_gradients(parameters, self.peers)

    def total_norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """See `GradientReducer`."""
        return total_norm([p.grad for p in parameters if p.grad is not None])


class SingleStage:
    """The stage of a model whose layers are all on this rank: see `runner.interfaces.PipelineStage`."""

    is_last = True
    index = 0
    num_stages = 1
    absent_modules: frozenset[Any] = frozenset()

    def schedule(self, count: int) -> Sequence[PipelineOp]:
        """Forward and backward, one micro-batch after the other."""
        return [turn for micro in range(count) for turn in (PipelineOp(micro), PipelineOp(micro, backward=True))]

    def forward_schedule(self, count: int) -> Sequence[PipelineOp]:
        """One after the other."""
        return [PipelineOp(micro) for micro in range(count)]

    def begin_op(self, op: PipelineOp) -> None:
        """There is one run of layers."""

    def tied_parameters(self) -> list[Tensor]:
        """No other rank has another end of the model."""
        return []

    def on_parameters_ready(self) -> None:
        """All parameters are here."""

    def run_local(self, run: Callable[[Callable[..., Any]], Tensor], forward: Callable[..., Any]) -> Tensor:
        """All layers."""
        return run(forward)


SINGLE_STAGE = SingleStage()


@dataclass(frozen=True, slots=True)
class BatchShard:
    """One rank's part of a batch.

    micros: of its own units; fillers: how many passes others make beyond; filler: the batch's smallest unit
    order: for each rank, in order, the spans (first row, row after the last, first token, token after it) of its units
    """

    micro_batches: Sequence[Batch]
    num_fillers: int
    filler: Batch
    order: Sequence[tuple[int, int, int, int]]

    def __iter__(self) -> Iterator[tuple[Batch, bool]]:
        """Each micro-batch that this rank runs, and whether it is one of its own."""
        yield from ((micro, True) for micro in self.micro_batches)
        yield from ((self.filler, False) for _ in range(self.num_fillers))

    def gather_outputs(self, peers: RankCollectives, outputs: Outputs) -> dict[str, Tensor]:
        """What all ranks computed, [T] or [N], of what each did on its own units end to end."""
        found = peers.all_gather_tensors(outputs)
        joined = {name: torch.cat([one[name] for one in found]) for name in found[0]}
        return {name: values[self._output_positions(len(values)).to(values.device)] for name, values in joined.items()}

    def _output_positions(self, size: int) -> Tensor:
        """Where in the ranks' outputs, laid end to end, each token's or row's value stands."""
        if not size:  # of a stage that sends everything to another
            return torch.arange(0)
        per_token = size == sum(last - first for *_, first, last in self.order)
        spans = [span[2:] if per_token else span[:2] for span in self.order]
        return torch.argsort(torch.cat([torch.arange(*span) for span in spans]))


def shard_batch(batch: Batch, budget: int, peers: RankCollectives, *, padded: bool) -> BatchShard:
    """This rank's part of a batch, in micro-batches of at most `budget` tokens (see `micro_batches`)."""
    spans = unit_spans(batch)
    sizes = [size for *_, size in spans]
    taken = footprints(batch) if padded else [Footprint(size) for size in sizes]
    owners = balance_by_cost(sizes, peers.size)
    hands = [[unit for unit, owner in enumerate(owners) if owner == rank] for rank in range(peers.size)]
    cut = [micro_batch_ranges([taken[unit] for unit in hand], budget, padded=padded) for hand in hands]
    mine = hands[peers.rank]
    micros = [_select_units(batch, spans, [mine[at] for at in run]) for run in cut[peers.rank]]
    ends = list(accumulate(sizes))
    order = [(*spans[unit][:2], ends[unit] - sizes[unit], ends[unit]) for hand in hands for unit in hand]
    smallest = min(range(len(sizes)), key=sizes.__getitem__)
    return BatchShard(micros, max(map(len, cut)) - len(micros), _select_units(batch, spans, [smallest]), order)


def map_sharded(
    batch: Batch,
    run: Callable[[Batch], Mapping[str, Tensor]],
    budget: int,
    peers: RankCollectives,
    *,
    padded: bool,
    stage: PipelineStage = SINGLE_STAGE,
) -> dict[str, Tensor]:
    """What `run` makes of micro-batches, [T] or [N], of the whole batch on every rank.

    stage: which of the model's layers are here; only where they end does `run` make anything
    """
    share = shard_batch(batch, budget, peers, padded=padded)
    micros, found = list(share), dict[int, Mapping[str, Tensor]]()
    for turn in stage.forward_schedule(len(micros)):
        stage.begin_op(turn)
        micro, own = micros[turn.micro]
        found[turn.micro] = drop_filler_outputs(run(micro), own)  # the last run of layers has the last word
    return share.gather_outputs(peers, concat_outputs([found[at] for at in range(len(micros))]))


def drop_filler_outputs(outputs: Mapping[str, Tensor], own: bool) -> Mapping[str, Tensor]:
    """The outputs of a micro-batch; none of a filler's, in their shapes and types."""
    return outputs if own else {name: values[:0] for name, values in outputs.items()}


def concat_outputs(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The outputs of micro-batches end to end."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _select_units(batch: Batch, spans: Sequence[tuple[int, int, int]], units: Sequence[int]) -> Batch:
    """Some units of a batch, in its order; a view where they are neighbors."""
    edges = [at for at in range(1, len(units)) if units[at] != units[at - 1] + 1]
    runs = [units[a:b] for a, b in zip([0, *edges], [*edges, len(units)], strict=True)]
    parts = [batch.slice_rows(spans[run[0]][0], spans[run[-1]][1]) for run in runs]
    return parts[0] if len(parts) == 1 else concat_batches(parts)
