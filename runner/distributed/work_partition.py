"""Partition of work among ranks that all have all inputs, so that only results are exchanged.

    costs        ──balanced──▶ the rank of each piece ──run──▶ each rank does its own ──▶ every result, on every rank
    a mini-batch ──units, balanced by tokens──▶ a shard for each rank ──cut by token budget──▶ micro-batches
    outputs of each rank's units ──gathered──▶ outputs of the whole batch, in its order, on every rank

Every rank has the whole batch and partitions it in the same way. All ranks run the same number of micro-batches: a rank
with fewer also runs fillers without effect, because models that gather their weights need it.

Legend: N rows, T tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runner.core.batch import Batch, ranges, select_units, unit_spans
from runner.core.errors import OutOfMemory, RunnerError
from runner.core.micro_batches import footprints, pack_units, split_units
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
        """Do nothing."""

    def start_all_reduce(self, tensors: Sequence[Tensor]) -> Callable[[], None]:
        """Do nothing."""
        return lambda: None

    def broadcast_(self, tensor: Tensor) -> None:
        """Do nothing."""


SINGLE_PROCESS = SingleProcess()


def balance_by_cost(costs: Sequence[int], ranks: int) -> list[int]:
    """The rank of each piece of work: the most expensive first, each to the rank with the least work.

    The ranks' costs differ by at most the most expensive piece, and do not depend on the order of pieces.
    """
    loads, owners = [(0, rank) for rank in range(ranks)], [0] * len(costs)
    for piece in sorted(range(len(costs)), key=costs.__getitem__, reverse=True) if ranks > 1 else ():
        load, owners[piece] = loads[0]
        heapq.heapreplace(loads, (load + costs[piece], owners[piece]))
    return owners


def group_by_prompt(requests: Sequence[Request]) -> tuple[list[list[int]], list[int]]:
    """Indices of requests that share a prompt, by group, and the cost of each group: its maximum tokens."""
    groups: dict[int, list[int]] = {}
    for at, request in enumerate(requests):
        groups.setdefault(request.group, []).append(at)
    members = list(groups.values())
    longest = [sum(requests[at].max_new_tokens for at in group) for group in members]
    return members, [len(requests[group[0]].prompt) + most for group, most in zip(members, longest, strict=True)]


@dataclass(frozen=True, slots=True)
class RemoteFailure:
    """Sent by a rank instead of results: the text of its exception, and its exit code."""

    message: str
    exit_code: int

    @classmethod
    def from_error(cls, error: Exception, rank: int) -> RemoteFailure:
        """The failure of `rank`."""
        known = isinstance(error, RunnerError)
        text = str(error) if known else f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        full = isinstance(error, torch.OutOfMemoryError)
        return cls(f"rank {rank}: {text}", OutOfMemory.exit_code if full else getattr(error, "exit_code", 1))

    def to_error(self) -> RunnerError:
        """The error that the other ranks raise."""
        return RunnerError(self.message, self.exit_code)


def run_partitioned(peers: RankCollectives, owners: Sequence[int], work: Callable[[list[int]], Sequence[T]]) -> list[T]:
    """The results of `work` for pieces 0 … n-1 in order, each done by the rank in `owners`.

    work: indices of this rank's pieces → their results; not called without pieces. An error on one rank is raised on
    all; on the others as a RunnerError with the same exit code that names the rank.
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
    """Run `work` on rank 0; returns its result, or raises its error, on every rank."""
    return run_partitioned(peers, [0], lambda _: [work()])[0]


def run_on_all(peers: RankCollectives, work: Callable[[], object]) -> None:
    """Run `work` on every rank; an error on one rank is raised on all, as by `run_partitioned`."""

    def mine(_: list[int]) -> list[None]:
        work()
        return [None]

    run_partitioned(peers, range(peers.size), mine)


class SingleStage:
    """The only stage of a model that is not split: see `runner.interfaces.PipelineStage`."""

    is_last = True
    index = 0
    num_stages = 1
    absent_modules: frozenset[Any] = frozenset()

    def schedule(self, count: int) -> Sequence[PipelineOp]:
        """Forward and backward pass of one micro-batch after the other."""
        return [turn for micro in range(count) for turn in (PipelineOp(micro), PipelineOp(micro, backward=True))]

    def forward_schedule(self, count: int) -> Sequence[PipelineOp]:
        """One after the other."""
        return [PipelineOp(micro) for micro in range(count)]

    def begin_op(self, op: PipelineOp) -> None:
        """Do nothing: there is one stage."""

    def tied_parameters(self) -> list[Tensor]:
        """None: no other rank has a part of the model."""
        return []

    def on_parameters_ready(self) -> None:
        """Do nothing: all parameters are on this rank."""

    def run_local(self, run: Callable[[Callable[..., Any]], Tensor], forward: Callable[..., Any]) -> Tensor:
        """Run all layers."""
        return run(forward)


SINGLE_STAGE = SingleStage()


@dataclass(frozen=True, slots=True)
class BatchShard:
    """One rank's part of a batch.

    micro_batches: of its own units; num_fillers: number of further passes of other ranks; filler: the smallest unit
    spans: the batch's `unit_spans`; order: the units of each rank's micro-batches, rank after rank
    """

    micro_batches: Sequence[Batch]
    num_fillers: int
    filler: Batch
    spans: NDArray[np.int64]
    order: NDArray[np.int64]

    def __iter__(self) -> Iterator[tuple[Batch, bool]]:
        """Each micro-batch that this rank runs, and whether it is its own or a filler."""
        yield from ((micro, True) for micro in self.micro_batches)
        yield from ((self.filler, False) for _ in range(self.num_fillers))

    def gather_outputs(self, peers: RankCollectives, outputs: Outputs) -> dict[str, Tensor]:
        """The outputs of the whole batch, [T] or [N], from each rank's outputs of its own units."""
        found = peers.all_gather_tensors(outputs)
        joined = {name: torch.cat([one[name] for one in found]) for name in found[0]}
        return {name: values[self._output_positions(len(values)).to(values.device)] for name, values in joined.items()}

    def _output_positions(self, size: int) -> Tensor:
        """The position of each token's or row's value in the concatenated outputs of the ranks."""
        if not size:  # of a stage that sends everything to another
            return torch.arange(0)
        first, last, tokens = self.spans.T
        counts = tokens if size == tokens.sum() else last - first
        return torch.argsort(ranges((np.cumsum(counts) - counts)[self.order], counts[self.order]))


def shard_batch(batch: Batch, budget: int, peers: RankCollectives, *, padded: bool) -> BatchShard:
    """This rank's part of a batch, in micro-batches of at most `budget` tokens (see `micro_batches`)."""
    spans, taken = unit_spans(batch), footprints(batch, padded)
    owners = np.array(balance_by_cost((taken.tokens + taken.patches).tolist(), peers.size))
    by_rank = np.split(np.argsort(owners, kind="stable"), np.cumsum(np.bincount(owners, minlength=peers.size))[:-1])
    hands = [(taken[hand], hand.tolist()) for hand in by_rank]
    cut = [[[hand[unit] for unit in units] for units in pack_units(one, budget)] for one, hand in hands]
    micros = split_units(batch, cut[peers.rank], spans)
    smallest = select_units(batch, [int(taken.tokens.argmin())], spans)
    order = np.array([unit for rank in cut for units in rank for unit in units])
    return BatchShard(micros, max(map(len, cut)) - len(micros), smallest, spans, order)


def map_sharded(
    batch: Batch,
    run: Callable[[Batch], Mapping[str, Tensor]],
    budget: int,
    peers: RankCollectives,
    *,
    padded: bool,
    stage: PipelineStage = SINGLE_STAGE,
) -> dict[str, Tensor]:
    """The outputs of `run`, [T] or [N], of the whole batch on every rank, computed in micro-batches.

    stage: this rank's pipeline stage; only the last stage has outputs
    """
    share = shard_batch(batch, budget, peers, padded=padded)
    micros, found = list(share), dict[int, Mapping[str, Tensor]]()
    for turn in stage.forward_schedule(len(micros)):
        stage.begin_op(turn)
        micro, own = micros[turn.micro]
        found[turn.micro] = drop_filler_outputs(run(micro.read()), own)  # the last run of layers has the last word
    return share.gather_outputs(peers, concat_outputs([found[at] for at in range(len(micros))]))


def drop_filler_outputs(outputs: Mapping[str, Tensor], own: bool) -> Mapping[str, Tensor]:
    """The outputs of a micro-batch; of a filler, empty ones."""
    return outputs if own else {name: values[:0] for name, values in outputs.items()}


def concat_outputs(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The concatenated outputs of micro-batches."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
