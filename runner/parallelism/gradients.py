"""The gradients of a model that is spread over a mesh: what is added over which ranks, and their norm.

backward ──▶ a part on each rank ──added over the copies of the same weights──▶ the same on all that hold them
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from runner.distributed.dtensor_utils import added_up, apart, local, total_norm
from runner.distributed.work_partition import ALONE, add_gradients, reached
from runner.interfaces import Peers, Stage


@dataclass(frozen=True, slots=True)
class MeshGradients:
    """copies: the ranks whose gradients of the same weights add up; experts: those of the same experts; stages: those
    that have the other layers; ends: the first and the last of these, on both; stage: what this rank has of the
    model; device: where it computes."""

    copies: Peers
    experts: Peers
    stages: Peers
    ends: Peers
    stage: Stage
    device: torch.device

    def add(self, parameters: Sequence[nn.Parameter]) -> None:
        """See `Gradients`."""
        found = reached([p for p in parameters if not added_up(p)], self.copies)
        for peers, experts in ((self.copies, False), (self.experts, True)):
            peers.sum_([local(p.grad) for p in found if p.grad is not None and apart(p) is experts])
        tied = {id(one) for one in self.stage.tied()}
        if both := [p for p in parameters if id(p) in tied]:
            add_gradients(both, self.ends)

    def norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """See `Gradients`."""
        if self.stages is ALONE:
            return total_norm([p.grad for p in parameters if p.grad is not None])
        return self._norm_of_stages(parameters)

    def _norm_of_stages(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """From the norm of each gradient, in the order of the parameters, so that it is that of one process to the last
        bit; but for what lies in pieces, of which stages give the sum of squares."""
        count = len(parameters)
        dtype = torch.float64 if any(p.dtype == torch.float64 for p in parameters) else torch.float32
        told = torch.zeros(2 * count + 1, dtype=dtype, device=self.device)  # norms, which there are, squares
        counted = {id(one) for one in self.stage.tied()} if self.stages.rank else set()  # by the first stage
        mine = [p.grad if id(p) not in counted else None for p in parameters]
        for place, gradient in enumerate(mine):
            if gradient is not None and not isinstance(gradient, DTensor):
                told[place], told[count + place] = total_norm([gradient]), 1
        if pieces := [gradient for gradient in mine if isinstance(gradient, DTensor)]:
            told[-1] = total_norm(pieces).to(dtype).square()
        self.stages.sum_([told])
        whole = torch.linalg.vector_norm(told[:count][told[count:-1] > 0])
        return (whole.square() + told[-1]).sqrt() if told[-1] else whole
