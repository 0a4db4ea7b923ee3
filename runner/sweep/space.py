"""What a search may try: one dimension per key that varies, read from Hydra's grammar."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from runner.sweep.need import Need


@dataclass(frozen=True, slots=True)
class Dimension:
    """The values of one key: an interval (`float`, `int`; both ends belong to it), or a choice of words.

    word: what stands before the equals sign, as typed; values: for a choice, the word and the value as it is shown
    """

    key: str
    word: str
    kind: Literal["float", "int", "choice"]
    low: float = 0.0
    high: float = 0.0
    step: int = 1
    log: bool = False
    values: tuple[tuple[str, str], ...] = ()

    def corners(self) -> list[str]:
        """The words for its ends, or for all of its choices: what is wrong with one of them is wrong with the space."""
        if self.kind == "choice":
            return [word for word, _ in self.values]
        return [self.typed(value)[0] for value in dict.fromkeys((self.low, self.high))]

    def typed(self, value: Any) -> tuple[str, str]:
        """The word that sets a value, and the value as it is shown."""
        if self.kind == "choice":
            return next(pair for pair in self.values if pair[0] == value)
        text = str(int(value)) if self.kind == "int" else f"{value:.6g}"
        return f"{self.word}={text}", text

    def described(self) -> str:
        """For a plan: 1e-05 … 0.01 (log)."""
        if self.kind == "choice":
            return ", ".join(shown for _, shown in self.values)
        steps = f" in steps of {self.step}" if self.kind == "int" and self.step > 1 else ""
        return f"{self.low:g} … {self.high:g}{steps}{' (log)' if self.log else ''}"


@dataclass(frozen=True, slots=True)
class Search:
    """What a search varies, and how a job is made of values: one job at a time, from what those before have shown.

    fixed: the words that all jobs share; prefix: the options with dashes that their command needs, too
    """

    space: tuple[Dimension, ...]
    fixed: tuple[str, ...]
    need: Need = field(default_factory=Need)
    prefix: tuple[str, ...] = ()
    config_dir: str | None = None
    spec: str | None = None

    def words(self, values: Mapping[str, Any]) -> tuple[list[str], dict[str, str]]:
        """The words of a job with these values, and what of them it varies."""
        pairs = {dimension.key: dimension.typed(values[dimension.key]) for dimension in self.space}
        return [*self.fixed, *(word for word, _ in pairs.values())], {key: shown for key, (_, shown) in pairs.items()}

    def corners(self) -> list[list[str]]:
        """Words of jobs that together try every end and every choice."""
        choices = [dimension.corners() for dimension in self.space]
        count = max(map(len, choices), default=0)
        return [[*self.fixed, *(words[min(i, len(words) - 1)] for words in choices)] for i in range(count)]


def of_json(data: Mapping[str, Any]) -> Search:
    """A search as sweep.json keeps it."""
    space = tuple(_dimension(one) for one in data["space"])
    fixed, prefix = tuple(data["fixed"]), tuple(data["prefix"])
    return Search(space, fixed, Need(**data["need"]), prefix, data["config_dir"], data["spec"])


def _dimension(data: Mapping[str, Any]) -> Dimension:
    return Dimension(**{**data, "values": tuple((word, shown) for word, shown in data["values"])})
