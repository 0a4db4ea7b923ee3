"""A sampler around another one, which hands on whatever it does not change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from runner.protocols.sampling import Request, Rollout, Sampler


class Around:
    """To be narrowed; see `Sampler`."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    @property
    def temperature(self) -> float:
        """That of the distribution sampled from."""
        return self._sampler.temperature

    @property
    def max_new_tokens(self) -> int:
        """Of one answer."""
        return self._sampler.max_new_tokens

    @property
    def longest(self) -> int | None:
        """Tokens of prompt and answer together; None = no limit."""
        return self._sampler.longest

    def load(self, tensors: Mapping[str, Tensor] | None, version: int) -> None:
        """Hand on a version of the weights."""
        self._sampler.load(tensors, version)

    def sample(self, requests: Sequence[Request]) -> list[Rollout]:
        """One rollout per request, in their order."""
        return self._sampler.sample(requests)

    def score(self, rows: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        """Log-probabilities of given rows, by each engine."""
        return self._sampler.score(rows)

    def measured(self) -> dict[str, float]:
        """Numbers since this was last asked for."""
        return self._sampler.measured()

    def release(self) -> None:
        """Do without what can be done without."""
        self._sampler.release()

    def close(self) -> None:
        """End what was started."""
        self._sampler.close()
