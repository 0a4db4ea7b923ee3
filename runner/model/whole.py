"""Where everything that a model computes begins, so that a model which lies in pieces can be gathered for it.

    whole.run(work) ──▶ embedding, norm, head gathered ──▶ work: layer by layer gathered, used, freed ──▶ outputs
    whole.gathered()    everything gathered for a while: any number of passes, and on no rank as many as on another

Pieces are those of torch's fully_shard (FSDP2), which hangs on the forward of modules; ours are used from outside of
their forward too, the LM head's weight in chunks. Hence one module around all, whose forward is whatever has to be
done. Layers that are cut (runner.parallelism.tensor_parallel) stay cut in a pass, and are joined where all is gathered.
A model that is not sharded passes through unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from runner.core import torch_compat

T = TypeVar("T")


class Whole(nn.Module):
    """The module, and what learns beside it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.frees = True  # whether a sharded layer's weights are freed between its forward and its backward pass
        self.joined: Callable[[], AbstractContextManager[None]] = nullcontext  # undoes for a while what cuts the layers
        self._inside = 0

    @property
    def sharded(self) -> bool:
        """Whether each rank holds a part of it only."""
        return any(isinstance(parameter, DTensor) or parameter.is_meta for parameter in self.parameters())

    def forward(self, work: Callable[[], T]) -> T:
        """What `work` gives."""
        return work()

    def run(self, work: Callable[[], T]) -> T:
        """What `work` gives, tensors or containers of them, with the parameters there that it uses.

        Collective where the model is sharded, its backward pass too: each rank runs as many passes as the others.
        """
        made: T = self(work)
        if not (self._inside or torch.is_grad_enabled()):  # else the backward pass needs what is gathered, and frees it
            self._forget()
        return made

    def _forget(self) -> None:
        if isinstance(self, FSDPModule):
            torch_compat.reset_iteration_state(self)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """The whole model on every rank for as long as the block lasts, for passes without gradient of which ranks
        may run different numbers. Collective on both ends; a block inside another one changes nothing."""
        parts, joined = ([], nullcontext) if self._inside else (self._parts(), self.joined)
        self._inside += 1
        try:
            for part in parts:
                torch_compat.reshard_after_forward(part, False)
                part.unshard()
            with joined():
                yield
        finally:
            self._inside -= 1
            if parts:
                self._forget()
            for part in parts:
                torch_compat.reshard_after_forward(part, self.frees and not isinstance(part, Whole))

    def _parts(self) -> list[FSDPModule]:
        return [part for part in self.modules() if isinstance(part, FSDPModule)]
