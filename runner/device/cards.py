"""Cards as `run plan` and MFU need them: memory, and peak operations per second."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from runner.core.package import read_table

GIB = 2**30
MIB = 2**20


class Card(NamedTuple):
    """An accelerator.

    memory: bytes, as its own tool reports them; flops: dense operations per second by what products are computed in
    (a data type, or tf32), without what no figure is known for; context: bytes (at least, at most) that the runtime
    keeps for itself; bandwidth: bytes of its memory that it reads per second, None where no figure is known; pattern:
    what its driver calls it.
    """

    name: str
    device: str
    memory: int
    flops: Mapping[str, float]
    context: tuple[int, int]
    bandwidth: float | None = None
    pattern: str = ""


def _card(memory_gib: int, context_mib: Sequence[int], **more: Any) -> Card:
    low, high = context_mib
    return Card(memory=memory_gib * GIB, context=(low * MIB, high * MIB), **more)


_TABLE = read_table(__file__, "cards.yaml")
CARDS = {card.name: card for card in (_card(**one) for one in _TABLE)}
DEFAULT_CARDS = {"npu": "910B", "cuda": "H100"}  # the default of `run plan`


def find_card(driver_name: str) -> Card | None:
    """The card that a driver calls so; None for one that is not in the table."""
    return next((card for card in CARDS.values() if re.fullmatch(card.pattern, driver_name)), None)
