"""The processes that a job's work is shared out to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

from torch import Tensor

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
