"""The search space: one dimension per varied key, read from Hydra's grammar.

If a search varies the recipe, a dimension of a recipe exists only in the jobs of that recipe.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from runner.core.device_kinds import ResourceRequest

T = TypeVar("T")
Pair = tuple[str, str]  # the word that sets a value, and the value as it is shown
WITHIN = 0.618  # fraction of an interval whose value is unlikely to be an integer
MOST_COMBINED = 64  # up to so many combinations of choices are all checked before a search; otherwise each choice


@dataclass(frozen=True, slots=True)
class Dimension:
    """The values of one key: an interval (`float`, `int`; both ends included), or a choice of words.

    word: the key as typed; values: of a choice, the word and the displayed value; given: a word that a job must have
    for the dimension to exist, empty = always
    """

    key: str
    word: str
    kind: Literal["float", "int", "choice"]
    low: float = 0.0
    high: float = 0.0
    step: int = 1
    log: bool = False
    values: tuple[Pair, ...] = ()
    given: str = ""

    @property
    def name(self) -> str:
        """A unique name: recipes may vary the same key in different ways."""
        return f"{self.given}: {self.key}" if self.given else self.key

    @property
    def size(self) -> int | None:
        """The number of values; None for an interval of real numbers."""
        if self.kind == "float":
            return None if self.low < self.high else 1
        return len(self.values) if self.kind == "choice" else int(self.high - self.low) // self.step + 1

    def corners(self) -> list[Pair]:
        """Both ends and, of real numbers, a value between them; or all choices. Used to check the space."""
        if self.kind == "choice":
            return list(self.values)
        within = [self.low + (self.high - self.low) * WITHIN] if self.kind == "float" else []
        return [self.override_for(value) for value in dict.fromkeys((self.low, *within, self.high))]

    def override_for(self, value: Any) -> Pair:
        """The word that sets a value, and the displayed value."""
        if self.kind == "choice":
            return next(pair for pair in self.values if pair[0] == value)
        text = str(int(value)) if self.kind == "int" else f"{value:.6g}"
        return f"{self.word}={text}", text

    def range_text(self) -> str:
        """For a plan: 1e-05 … 0.01 (log)."""
        where = f" (with {self.given.lstrip('+')})" if self.given else ""
        if self.kind == "choice":
            return ", ".join(shown for _, shown in self.values) + where
        steps = f" in steps of {self.step}" if self.kind == "int" and self.step > 1 else ""
        return f"{self.low:g} … {self.high:g}{steps}{' (log)' if self.log else ''}{where}"


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """The dimensions of a search, and the words of a job with certain values.

    fixed: words of all jobs; prefix: options with dashes of their commands; files: a fingerprint of what the config
    files make of the corners
    """

    space: tuple[Dimension, ...]
    fixed: tuple[str, ...]
    need: ResourceRequest = field(default_factory=ResourceRequest)
    prefix: tuple[str, ...] = ()
    config_dir: str | None = None
    spec: str | None = None
    files: str = ""

    @property
    def always(self) -> tuple[Dimension, ...]:
        """The dimensions that every job has."""
        return tuple(dimension for dimension in self.space if not dimension.given)

    def only_in(self, values: Mapping[str, Any]) -> tuple[Dimension, ...]:
        """The further dimensions of a job with these values."""
        chosen = {dimension.override_for(values[dimension.name])[0] for dimension in self.always}
        return tuple(dimension for dimension in self.space if dimension.given in chosen)

    def words(self, values: Mapping[str, Any]) -> tuple[list[str], dict[str, str]]:
        """The words of a job with these values (dimension's name → value), and its varied values."""
        pairs = {d.key: d.override_for(values[d.name]) for d in self.space if d.name in values}
        return [*self.fixed, *(word for word, _ in pairs.values())], {key: shown for key, (_, shown) in pairs.items()}

    def size(self) -> int | None:
        """The number of different jobs; None if it is infinite or not known."""
        sizes = [dimension.size for dimension in self.space]
        if None in sizes or len(self.always) < len(self.space):
            return None
        return math.prod(size for size in sizes if size is not None)

    def corners(self) -> list[tuple[list[str], dict[str, str]]]:
        """Words and varied values of jobs that together have every end and every choice.

        With few combinations of choices, all of them are included.
        """
        choices = [[(d, pair) for pair in d.corners()] for d in self.always if d.kind == "choice"]
        few = math.prod(map(len, choices)) <= MOST_COMBINED
        together = list(itertools.product(*choices)) if few else list(_side_by_side(choices))
        rows = [(*chosen, *rest) for chosen in together for rest in self._ends([word for _, (word, _) in chosen])]
        return [
            ([*self.fixed, *(word for _, (word, _) in row)], {d.key: shown for d, (_, shown) in row}) for row in rows
        ]

    def _ends(self, chosen: Sequence[str]) -> Iterator[tuple[tuple[Dimension, Pair], ...]]:
        """The ends of the other dimensions of a job with these choices."""
        rest = [d for d in self.space if d.given in chosen or (not d.given and d.kind != "choice")]
        return _side_by_side([[(d, pair) for pair in d.corners()] for d in rest]) if rest else iter([()])


def _side_by_side(columns: Sequence[Sequence[T]]) -> Iterator[tuple[T, ...]]:
    """Rows that together have every entry of every column; a shorter column repeats its last entry."""
    for row in range(max(map(len, columns), default=0)):
        yield tuple(column[min(row, len(column) - 1)] for column in columns)
