"""Process groups of a mesh: objects over gloo, sums over the device's backend, pipeline transfers.

Hidden states and gradients are sent between neighboring stages.

    world     ──for each set of mesh dimensions──▶ lists of ranks ──every rank creates each──▶ this rank's own group
    tensors   ──end to end──▶ buckets ──all-reduce, one in flight while the next is filled──▶ back in place

    stage 0 ──hidden──▶ stage 1 ──hidden──▶ stage 2        (──▶ stage 0, where stages have several runs of layers)
            ◀─gradient─         ◀─gradient─

Groups are created once, in the same order on every rank, each with the job's timeout. Each direction between two
neighboring stages has its own group of two ranks, so that hidden states do not wait for gradients, as they would with a
shared communicator. Both sides know shape and dtype; sending does not block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh

from runner.core.errors import DeadlineExceeded, RankLost
from runner.core.rank_info import is_connection_loss
from runner.distributed.gradient_sums import PendingSums, buckets_by_dtype
from runner.interfaces import RankCollectives
from runner.parallelism.mesh import DATA_DIMS, REPLICA_DIMS, Mesh, RankGroup, group_of_rank

T = TypeVar("T")
CHUNK_BYTES = 256 * 2**20  # well below the 2^31 of an index


class ProcessGroupCollectives:
    """The ranks of a process group whose backend on the CPU is gloo."""

    def __init__(self, group: Any, timeout_s: float) -> None:
        self._group, self._timeout_s = group, timeout_s
        self.rank = distributed.get_rank(group)
        self.size = distributed.get_world_size(group)

    def all_gather(self, value: T) -> list[T]:
        """See `RankCollectives`."""
        found: list[Any] = [None] * self.size
        with self._translate_errors("gathering"):
            distributed.all_gather_object(found, value, group=self._group)
        return found

    def all_gather_tensors(self, tensors: Mapping[str, Tensor]) -> list[Mapping[str, Tensor]]:
        """See `RankCollectives`."""
        found = self.all_gather({name: tensor.cpu() for name, tensor in tensors.items()})
        return [{name: one[name].to(tensor.device) for name, tensor in tensors.items()} for one in found]

    def all_reduce_(self, tensors: Sequence[Tensor]) -> None:
        """See `RankCollectives`. Needs memory for two buckets."""
        sums = PendingSums(self.start_all_reduce)
        for bucket in buckets_by_dtype(tensors):
            sums.add(bucket)
        sums.finish()

    def start_all_reduce(self, tensors: Sequence[Tensor]) -> Callable[[], None]:
        """See `RankCollectives`. Sums 16-bit numbers in float32."""
        with self._translate_errors("summing"):
            flat = torch.cat([one.reshape(-1) for one in tensors])
            flat = flat.float() if flat.dtype.itemsize < 4 and flat.is_floating_point() else flat
            work = distributed.all_reduce(flat, group=self._group, async_op=True)

        def finish() -> None:
            with self._translate_errors("summing"):
                work.wait()
            parts = torch.split(flat, [one.numel() for one in tensors])
            for one, part in zip(tensors, parts, strict=True):
                one.copy_(part.view_as(one))

        return finish

    def broadcast_(self, tensor: Tensor) -> None:
        """See `RankCollectives`. It is sent as signed bytes, which every backend supports."""
        with self._translate_errors("broadcasting"):
            for run in tensor.reshape(-1).view(torch.int8).split(CHUNK_BYTES):
                distributed.broadcast(run, group=self._group, group_src=0)

    @contextmanager
    def _translate_errors(self, doing: str) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError:  # of this rank
            raise
        except RuntimeError as error:
            kind = RankLost if is_connection_loss(str(error)) else DeadlineExceeded
            raise kind(
                f"rank {self.rank} of {self.size}, {doing}: another rank exited, or did not arrive within "
                f"parallelism.timeout_s={self._timeout_s:g} ({(str(error).splitlines() or [''])[0]})\n"
                "  the error of the other rank is the cause; see ranks/*.log in the run's folder"
            ) from error


class PipelineCollectives(ProcessGroupCollectives):
    """The data ranks of a pipeline-parallel job: the values of the last stage count.

    everyone: the data ranks of all stages, those of the last stage last; all of them call every method
    """

    def __init__(self, group: Any, everyone: RankCollectives, timeout_s: float, device: torch.device) -> None:
        super().__init__(group, timeout_s)
        self._everyone, self._device = everyone, device

    def all_gather(self, value: T) -> list[T]:
        """See `RankCollectives`."""
        return self._everyone.all_gather(value)[-self.size :]

    def all_gather_tensors(self, tensors: Mapping[str, Tensor]) -> list[Mapping[str, Tensor]]:
        """See `RankCollectives`; other stages need no tensors."""
        found = self.all_gather({name: tensor.cpu() for name, tensor in tensors.items()})
        return [{name: tensor.to(self._device) for name, tensor in one.items()} for one in found]


# dimensions in which a stage's weights are distributed; cp ranks are part of dp_shard
WEIGHT_DIMS = ("dp_replicate", "dp_shard", "tp")


@dataclass(frozen=True, slots=True)
class MeshGroups:
    """The groups of this rank.

    by_name: `data`, `copies` (ranks whose gradients are summed), `cp`, `tp`, `pp`, `ep`, `expert_copies`,
    `expert_pieces`, `dp_replicate`, `dp_shard`; with pipeline stages also `stages`, the data ranks of all stages, and
    `ends`, the first and the last of `pp`
    """

    by_name: Mapping[str, Any]
    weights: DeviceMesh  # the ranks of this stage, by WEIGHT_DIMS
    experts: DeviceMesh  # the ranks of this stage and tensor-parallel rank, by `Mesh.expert_grid`
    stage_links: StageLinks | None = None  # to the neighboring stages


def create_groups(mesh: Mesh, kind: str, backend: str, timeout: timedelta, chunks: int = 1) -> MeshGroups:
    """Create the groups of all ranks; chunks: virtual stages per pp rank. Collective."""
    every = mesh.groups()
    if mesh.pp > 1:
        every["stages"] = mesh.rank_groups("pp", *DATA_DIMS)
        every["ends"] = [(stages[0], stages[-1]) for stages in mesh.rank_groups("pp")]
    rank = distributed.get_rank()
    known: dict[tuple[RankGroup, ...], Any] = {}
    for families in every.values():
        if (key := tuple(families)) not in known:
            ranks = [list(one) for one in families]
            known[key], _ = distributed.new_subgroups_by_enumeration(ranks, timeout=timeout, backend=backend)
    own = {name: known[tuple(families)] for name, families in every.items()}
    stage = torch.tensor(group_of_rank(mesh.rank_groups(*REPLICA_DIMS, "tp"), rank))
    stage = stage.view(mesh.dp_replicate, mesh.dp_shard_cp_size, mesh.tp)
    weights = DeviceMesh.from_group([own[name] for name in WEIGHT_DIMS], kind, stage, mesh_dim_names=WEIGHT_DIMS)
    experts = _expert_mesh(mesh, own, kind, group_of_rank(mesh.rank_groups(*REPLICA_DIMS), rank))
    pair = partial(distributed.new_group, timeout=timeout, backend=backend)
    links = make_stage_links(mesh.rank_groups("pp"), chunks, pair) if mesh.pp > 1 else None
    return MeshGroups(own, weights, experts, links)


def _expert_mesh(mesh: Mesh, own: Mapping[str, Any], kind: str, copies: RankGroup) -> DeviceMesh:
    named = {**own, "dp_shard": own["expert_pieces"]}
    names, ranks = tuple(mesh.expert_grid), torch.tensor(copies).view(*mesh.expert_grid.values())
    return DeviceMesh.from_group([named[name] for name in names], kind, ranks, mesh_dim_names=names)


@dataclass(slots=True)
class P2pChannel:
    """One direction between two neighboring stages, on one of its ranks.

    max_pending: number of unreceived messages above which a sender waits
    """

    group: Any
    max_pending: int
    pending: deque[tuple[Any, Tensor]] = field(default_factory=deque)  # keeps tensors until they are sent

    @property
    def _other(self) -> int:
        return 1 - distributed.get_rank(self.group)

    def send(self, tensor: Tensor) -> None:
        """Start sending a tensor, whose memory must not change afterwards."""
        while self.pending and (self.pending[0][0].is_completed() or len(self.pending) >= self.max_pending):
            work, _ = self.pending.popleft()
            work.wait()
        tensor = tensor.detach().contiguous()
        self.pending.append((distributed.isend(tensor, group=self.group, group_dst=self._other), tensor))

    def receive(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Receive the next tensor."""
        tensor = torch.empty(shape, dtype=dtype, device=device)
        distributed.recv(tensor, group=self.group, group_src=self._other)
        return tensor


@dataclass(frozen=True, slots=True)
class StageLink:
    """The channels between a stage and the next one."""

    hidden: P2pChannel
    gradients: P2pChannel


@dataclass(frozen=True, slots=True)
class StageLinks:
    """The links of a stage to the previous and the next one; None at the ends."""

    before: StageLink | None
    after: StageLink | None

    def warm_up(self, device: torch.device) -> None:
        """Send a number each way, so that errors between ranks appear now. All stages call it."""
        one = torch.ones(1, device=device)
        if self.after is not None:
            self.after.hidden.send(one)
        if self.before is not None:
            self.before.gradients.send(one)
            self.before.hidden.receive([1], one.dtype, device)
        if self.after is not None:
            self.after.gradients.receive([1], one.dtype, device)


def make_stage_links(families: Sequence[RankGroup], chunks: int, new_group: Callable[[list[int]], Any]) -> StageLinks:
    """Create the groups between the stages of each of `families`, in the same order on all ranks.

    Returns the links of this rank. chunks: virtual stages per rank; with several, the last stage sends to the first.
    Collective.
    """
    rank, room = distributed.get_rank(), 2 * len(families[0]) * chunks
    before: StageLink | None = None
    after: StageLink | None = None
    for ranks in families:
        ring = [(ranks[-1], ranks[0])] if chunks > 1 else []
        for left, right in [*pairwise(ranks), *ring]:
            border = StageLink(*(P2pChannel(new_group([left, right]), room) for _ in range(2)))
            after = border if rank == left else after
            before = border if rank == right else before
    return StageLinks(before, after)
