"""One process: every sum over ranks is the number itself."""

from __future__ import annotations

from collections.abc import Mapping

from runner.parallelism.config import SingleConfig
from runner.protocols import N


class SingleRank:
    """The only data rank."""

    rank = 0
    size = 1

    def __init__(self, config: SingleConfig) -> None:
        self.config = config

    def sum(self, values: Mapping[str, N]) -> dict[str, N]:
        """Counts or values over all data ranks."""
        return dict(values)
