"""Parts of what is held at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Term:
    """A part of a phase's memory, in bytes. pooled: whether an engine takes it as one piece, of which nothing is lost
    to fragmentation."""

    name: str
    bytes: int
    pooled: bool = False


@dataclass(frozen=True, slots=True)
class Phase:
    """What is held at once in one phase of a step."""

    name: str
    terms: Sequence[Term]

    @property
    def bytes(self) -> int:
        """All of it."""
        return sum(term.bytes for term in self.terms)

    @property
    def pooled(self) -> int:
        """What of it engines take as one piece."""
        return sum(term.bytes for term in self.terms if term.pooled)
