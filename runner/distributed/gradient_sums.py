"""Sums of gradients over ranks, while the last backward pass of a mini-batch still runs.

    parameters ──last first──▶ buckets ──each, when its gradients are complete──▶ all-reduce, two in flight ──▶ in place

Buckets are summed in the same order on all ranks, whatever order their gradients come in. The hooks are torch's own, so
that any device with collectives has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from runner.core import torch_compat
from runner.distributed.dtensor_utils import is_expert_sharded, is_reduced_in_backward, local_tensor, total_norm
from runner.distributed.work_partition import SINGLE_PROCESS, SINGLE_STAGE
from runner.interfaces import PipelineStage, RankCollectives

BUCKET_BYTES = 25 * 2**20  # as torch's DistributedDataParallel
IN_FLIGHT = 2


def buckets_by_dtype(tensors: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """Consecutive tensors of one dtype, in buckets of at most BUCKET_BYTES or one tensor."""
    held, filled = list[Tensor](), 0
    for tensor in tensors:
        if held and (held[0].dtype != tensor.dtype or filled + tensor.nbytes > BUCKET_BYTES):
            yield held
            held, filled = [], 0
        held.append(tensor)
        filled += tensor.nbytes
    if held:
        yield held


class PendingSums:
    """All-reduces in flight, at most IN_FLIGHT of them: each needs memory for its bucket."""

    def __init__(self, start: Callable[[Sequence[Tensor]], Callable[[], None]]) -> None:
        """start: begins to sum a bucket; what it returns waits for the sums and copies them back."""
        self._start, self._pending = start, list[Callable[[], None]]()

    def add(self, bucket: Sequence[Tensor]) -> None:
        """Begin to sum a bucket in place."""
        self.finish(IN_FLIGHT - 1)
        self._pending.append(self._start(bucket))

    def finish(self, left: int = 0) -> None:
        """Wait until at most so many are in flight."""
        while len(self._pending) > left:
            self._pending.pop(0)()


class GradientBuckets:
    """The gradients of parameters that all of `peers` have; they are summed bucket by bucket."""

    def __init__(self, parameters: Sequence[nn.Parameter], peers: RankCollectives) -> None:
        self._parameters = parameters
        self._sums = PendingSums(peers.start_all_reduce)
        ordered = iter(reversed(parameters))  # as the backward pass reaches them
        sizes = [len(bucket) for bucket in buckets_by_dtype([local_tensor(p) for p in reversed(parameters)])]
        self._buckets = [[next(ordered) for _ in range(size)] for size in sizes]
        self._missing = [{id(p) for p in bucket} for bucket in self._buckets]
        self._bucket_of = {id(p): at for at, bucket in enumerate(self._buckets) for p in bucket}
        self._next = 0

    def on_gradient(self, parameter: Tensor) -> None:
        """The backward pass has accumulated the gradient of a parameter; it must not do so twice."""
        self._missing[self._bucket_of[id(parameter)]].remove(id(parameter))
        self._sum_complete()

    def _sum_complete(self) -> None:
        while self._next < len(self._buckets) and not self._missing[self._next]:
            bucket, self._next = self._buckets[self._next], self._next + 1
            self._sums.add([local_tensor(p.grad) for p in bucket if p.grad is not None])

    def finish(self) -> None:
        """Sum what is left. Collective.

        Missing gradients become zero. Where no rank has one there is none, so the optimizer skips it as in one process.
        """
        lacking = [at for at, parameter in enumerate(self._parameters) if parameter.grad is None]
        found = torch.ones(len(self._parameters), device=self._parameters[0].device)
        for at in lacking:
            found[at], self._parameters[at].grad = 0, torch.zeros_like(self._parameters[at])
        self._missing = [set() for _ in self._buckets]
        self._sum_complete()
        self._sums.add([found])
        self._sums.finish()
        counts = found.tolist() if lacking else []  # a rank that has all gradients does not wait for its device
        for at in lacking:
            if not counts[at]:
                self._parameters[at].grad = None


def sum_gradients(parameters: Sequence[nn.Parameter], peers: RankCollectives) -> None:
    """Sum the ranks' gradients in place. Collective."""
    if parameters and peers.size > 1:
        GradientBuckets(parameters, peers).finish()


@contextmanager
def sum_during_backward(parameters: Sequence[nn.Parameter], peers: RankCollectives) -> Iterator[None]:
    """A block with the last backward pass of a mini-batch, which also sums gradients over `peers`."""
    if not parameters or peers.size == 1:
        yield
        return
    buckets = GradientBuckets(parameters, peers)
    tensors: Sequence[Any] = parameters  # the hook has no types
    handles = [parameter.register_post_accumulate_grad_hook(buckets.on_gradient) for parameter in tensors]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    buckets.finish()


@dataclass(frozen=True, slots=True)
class MeshGradientReducer:
    """Sums gradients over the ranks of a mesh: see `GradientReducer`.

    copies: ranks with the same weights; device: where it computes; experts: ranks with the same experts; stages: ranks
    of all pipeline stages; ends: the first and the last stage, on both; stage: that of this rank; root: the model's
    `whole`, None = not sharded
    """

    copies: RankCollectives
    device: torch.device
    experts: RankCollectives = SINGLE_PROCESS
    stages: RankCollectives = SINGLE_PROCESS
    ends: RankCollectives = SINGLE_PROCESS
    stage: PipelineStage = SINGLE_STAGE
    root: Any = None

    @contextmanager
    def backward(self, parameters: Sequence[nn.Parameter], is_last: bool) -> Iterator[None]:
        """See `GradientReducer`."""
        if getattr(self.root, "accumulates_gradients", False):
            self.root.set_requires_gradient_sync(is_last)
        if not is_last:
            yield
            return
        replicated = [p for p in parameters if not (p.is_meta or is_reduced_in_backward(p))]
        experts = [p for p in replicated if is_expert_sharded(p)]
        with sum_during_backward([p for p in replicated if not is_expert_sharded(p)], self.copies):
            yield
        sum_gradients(experts, self.experts)
        tied = {id(one) for one in self.stage.tied_parameters()}  # now: before, FSDP may have put gathered ones there
        sum_gradients([p for p in parameters if id(p) in tied], self.ends)

    def discard(self) -> None:
        """See `GradientReducer`."""
        if getattr(self.root, "accumulates_gradients", False):
            torch_compat.discard_unsharded_gradients(self.root)

    def total_norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """See `GradientReducer`."""
        if self.stages is SINGLE_PROCESS:
            return total_norm([p.grad for p in parameters if p.grad is not None])
        return self._norm_of_stages(parameters)

    def _norm_of_stages(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """The total norm from the norm of each gradient, in the order of parameters.

        It is bit for bit that of one process, except for shards, of which each stage adds the sum of squares.
        """
        count = len(parameters)
        dtype = torch.float64 if any(p.dtype == torch.float64 for p in parameters) else torch.float32
        # norms, whether there is one, sum of squares
        norms = torch.zeros(2 * count + 1, dtype=dtype, device=self.device)
        # counted by the first stage
        counted = {id(one) for one in self.stage.tied_parameters()} if self.stages.rank else set()
        mine = [p.grad if id(p) not in counted else None for p in parameters]
        for place, gradient in enumerate(mine):
            if gradient is not None and not isinstance(gradient, DTensor):
                norms[place], norms[count + place] = total_norm([gradient]), 1
        if pieces := [gradient for gradient in mine if isinstance(gradient, DTensor)]:
            norms[-1] = total_norm(pieces).to(dtype).square()
        self.stages.all_reduce_([norms])
        whole: Tensor = torch.linalg.vector_norm(norms[:count][norms[count:-1] > 0])
        return (whole.square() + norms[-1]).sqrt() if norms[-1] else whole
