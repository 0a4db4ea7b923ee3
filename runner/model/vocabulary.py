"""The vocabulary of a head's logits: all of it on this rank, or a run of ids on each of several.

    hidden [n, H] ──▶ logits [n, V/tp] of this rank's ids ──top, sum of exponentials over the ranks──▶ log-probabilities

No rank makes the logits of another one's ids (the loss-parallel head of Shoeybi et al., 1909.08053, section 3), but for
a function that has to see whole rows of them, chunk by chunk.

Legend: n tokens of a chunk, H hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor

from runner.distributed.dtensor_utils import span
from runner.model.precision import stored_parameter


class Vocabulary:
    """All ids."""

    def log_softmax(self, logits: Tensor) -> Tensor:
        """Log-probabilities [n, V] of logits, in float32 or better."""
        return F.log_softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))

    def at(self, values: Tensor, targets: Tensor) -> Tensor:
        """What `values` [n, V] has for each token's target id, [n]."""
        return values.gather(1, targets[:, None])[:, 0]

    def add_at(self, values: Tensor, targets: Tensor, amounts: Tensor) -> Tensor:
        """`values`, with `amounts` [n] added there, in place."""
        return values.scatter_add_(1, targets[:, None], amounts[:, None])

    def total(self, values: Tensor) -> Tensor:
        """Sums over ids that each rank has made of its own, over all ids; in place."""
        return values

    def joined(self, logits: Tensor) -> Tensor:
        """Of all ids."""
        return logits

    def own(self, logits: Tensor) -> Tensor:
        """Of this rank's ids."""
        return logits


@dataclass(frozen=True, slots=True)
class Run(Vocabulary):
    """The ids from `first` to before `end`, as many as each of the `size` ranks of `group` has.

    All ranks call the same verbs for the same tokens; what is [n] comes out alike on all of them.
    """

    group: Any
    size: int
    first: int
    end: int

    def log_softmax(self, logits: Tensor) -> Tensor:
        """See `Vocabulary`; of this rank's ids."""
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        top = wide.amax(1, keepdim=True)
        distributed.all_reduce(top, distributed.ReduceOp.MAX, group=self.group)
        wide = wide - top
        return wide.sub_(self.total(wide.exp().sum(1, keepdim=True)).log_())

    def at(self, values: Tensor, targets: Tensor) -> Tensor:
        """See `Vocabulary`."""
        places, mine = self._places(targets)
        return self.total(Vocabulary.at(self, values, places).masked_fill(~mine, 0))

    def add_at(self, values: Tensor, targets: Tensor, amounts: Tensor) -> Tensor:
        """See `Vocabulary`."""
        places, mine = self._places(targets)
        return Vocabulary.add_at(self, values, places, amounts.masked_fill(~mine, 0))

    def total(self, values: Tensor) -> Tensor:
        """See `Vocabulary`."""
        distributed.all_reduce(values, group=self.group)
        return values

    def joined(self, logits: Tensor) -> Tensor:
        """See `Vocabulary`."""
        logits = logits.contiguous()
        parts = [torch.empty_like(logits) for _ in range(self.size)]
        distributed.all_gather(parts, logits, group=self.group)
        return torch.cat(parts, 1)

    def own(self, logits: Tensor) -> Tensor:
        """See `Vocabulary`."""
        return logits[:, self.first : self.end]

    def _places(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Where the targets are among this rank's ids, 0 for those of others, and which are its own."""
        mine = (targets >= self.first) & (targets < self.end)
        return (targets - self.first).masked_fill(~mine, 0), mine


ALL = Vocabulary()


def of(head: nn.Module) -> tuple[Tensor, Vocabulary]:
    """What this rank holds of a plain head's weight [V, H], differentiable, as it is stored, and the ids
    that it makes logits of."""
    weight: Any = stored_parameter(head, "weight")
    if not isinstance(weight, DTensor):
        return weight, ALL
    rows, mesh = span(weight)[0], weight.device_mesh
    if rows == slice(0, len(weight)):
        return weight.to_local(), ALL
    return weight.to_local(), Run(mesh.get_group(), mesh.size(), rows.start, rows.stop)
