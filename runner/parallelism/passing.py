"""A forward pass through some of a model's layers: what comes in from other ranks, and what goes out to them.

layers of the model   0   1   2   3   4   5
what the pass meets   ·   in  2   3  out          in: hidden states received; out: sent, and the pass is left
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from runner.parallelism.borders import Border


class Received(torch.autograd.Function):
    """Hidden states from the stage before, which their gradient goes back to."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, border: Border, blank: Tensor) -> Tensor:
        ctx.border = border
        return border.hidden.receive(blank.shape, blank.dtype, blank.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ctx.border.gradients.send(grad)
        return None, None, None


class Sent(torch.autograd.Function):
    """Nothing, [0]; hidden states have gone to the stage after this one, from which their gradient comes."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, border: Border, hidden: Tensor) -> Tensor:
        ctx.border, ctx.like = border, (hidden.shape, hidden.dtype, hidden.device)
        border.hidden.send(hidden)
        return hidden.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:
        return None, None, ctx.border.gradients.receive(*ctx.like)


class HandedOn(Exception):
    """Leaves a forward pass whose other layers are on other ranks; token: what its backward pass begins at."""

    def __init__(self, token: Tensor) -> None:
        super().__init__()
        self.token = token


class Elsewhere:
    """What stands for a layer of another stage, or of a run of layers that has no turn now."""

    def __init__(self, layer: nn.Module, work: Callable[[Tensor], Tensor]) -> None:
        self._layer, self._work = layer, work

    def __call__(self, *inputs: Any, **keywords: Any) -> Tensor:
        """What becomes of the hidden states, which come first or by name."""
        return self._work(inputs[0] if inputs else keywords["hidden_states"])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


class Shows(Protocol):
    """What is needed of a stage."""

    passing: bool  # whether a forward pass is in it

    def shown(self, layers: Sequence[nn.Module]) -> list[Any]: ...  # what stands for each of them in it


class Layers(nn.ModuleList):
    """The layers of a model, of which a pass is shown those of its stage, and `Elsewhere` for the others."""

    def __init__(self, layers: Sequence[nn.Module], stage: Shows) -> None:
        super().__init__(layers)
        self._stage = stage

    def __iter__(self) -> Iterator[Any]:
        return iter(self._shown())

    def __getitem__(self, index: Any) -> Any:
        return self._shown()[index] if isinstance(index, slice) else super().__getitem__(index)

    def _shown(self) -> list[Any]:
        layers = [layer for layer in self._modules.values() if layer is not None]
        return self._stage.shown(layers) if self._stage.passing else layers
