"""The processes that a job's work is shared out to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

from runner.turns import Turn

T = TypeVar("T")


class Peers(Protocol):
    """The data ranks of a job as one of them, `rank` of `size`, sees them.

    Every verb is collective: all ranks call the same ones in the same order. Each raises DeadlineExceeded where a rank
    does not come.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    # what each rank gave, in the order of the ranks: plain values, records of them, tensors on the CPU
    def gather(self, value: T) -> list[T]: ...

    # the same of named tensors, which come back on the device they are on here
    def gather_tensors(self, tensors: Mapping[str, Tensor]) -> list[Mapping[str, Tensor]]: ...

    # in place, on their device; all ranks give the same shapes and data types; half precision is added in float32
    def sum_(self, tensors: Sequence[Tensor]) -> None: ...

    # in place, on its device: becomes the first rank's, byte for byte; all give the same shape and type, contiguous
    def from_first_(self, tensor: Tensor) -> None: ...


class Gradients(Protocol):
    """How what the ranks find of a model's gradients becomes that of one process. Both verbs are collective."""

    # add what other ranks found, in place, of the parameters that learn, in the same order on all ranks
    def add(self, parameters: Sequence[nn.Parameter]) -> None: ...

    # the 2-norm of all gradients together, float32 [], equal on all ranks
    def norm(self, parameters: Sequence[nn.Parameter]) -> Tensor: ...


class Stage(Protocol):
    """The layers of a model that lie on this rank, in one run or, interleaved with those of other ranks, in several."""

    @property
    def ends(self) -> bool: ...  # whether the run of layers that is entered is the last, and the heads follow it

    @property
    def depth(self) -> int: ...  # how many runs of layers come before it

    @property
    def stages(self) -> int: ...  # how many ranks a micro-batch passes through

    @property
    def elsewhere(self) -> frozenset[nn.Module | nn.Parameter]: ...  # layers and parameters that other ranks have

    # parameters that the first and the last rank both have, each with a part of the gradient
    def tied(self) -> Sequence[Tensor]: ...

    # the passes of so many micro-batches, in the order in which no rank waits for ever
    def turns(self, count: int) -> Sequence[Turn]: ...

    def flow(self, count: int) -> Sequence[Turn]: ...  # those of passes without gradient

    def enter(self, turn: Turn) -> None: ...  # the next pass is this one

    # all parameters that are here have their numbers, and will stay these objects
    def settle(self) -> None: ...

    # what `run` makes of a transformers model's forward, or of as much of it as lies here
    def passed(self, run: Callable[[Callable[..., Any]], T], forward: Callable[..., Any]) -> T: ...
