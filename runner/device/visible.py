"""Reads lists of visible devices (ASCEND_RT_VISIBLE_DEVICES, CUDA_VISIBLE_DEVICES), whose mistakes drivers hide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

VARIABLES = {"npu": "ASCEND_RT_VISIBLE_DEVICES", "cuda": "CUDA_VISIBLE_DEVICES"}


@dataclass(frozen=True, slots=True)
class Visible:
    """What a list asks for, in its order (numbers, or names such as GPU-1a2b and MIG-…), and what is wrong in it."""

    ids: tuple[int | str, ...]
    faults: tuple[str, ...]

    def beyond(self, count: int) -> list[int]:
        """The numbers that `count` devices do not have."""
        return [number for number in self.ids if isinstance(number, int) and number >= count]


def parse(text: str, names: Sequence[str] = ()) -> Visible:
    """Read a list with commas; entries that begin with one of `names` are devices by name, all others numbers.

    An empty text asks for no device at all.
    """
    ids: list[int | str] = []
    faults = []
    for piece in [part.strip() for part in text.split(",")] if text.strip() else []:
        if piece.isdecimal():
            ids.append(int(piece))
        elif names and piece.startswith(tuple(names)):
            ids.append(piece)
        else:
            faults.append(f"'{piece}' is no device number" if piece else "an empty entry")
    repeated = sorted({str(number) for number in ids if ids.count(number) > 1})
    return Visible(tuple(ids), (*faults, *(f"{number} stands twice" for number in repeated)))
