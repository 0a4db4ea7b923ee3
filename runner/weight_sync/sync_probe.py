"""The sync probe: after a weight sync, samplers score fixed rows, which must match the trainer.

    publisher ──expect(version, log-probabilities)──▶ SyncProbe ◀──load, score── each sampler, after every load

It finds what no digest does: an engine that has the bytes and does not use them (weights tied again, in another layout,
under another name). Such an error is of the order of nats. In bfloat16 correct engines differ, too: log-probabilities
of unlikely ids differ by some 0.1 by rounding alone (measured with 12 and 24 layers, random weights, logits that spread
by 2 to 3.5: 0.04 to 0.12). Weights that are a step old cannot be distinguished from that. `runner.core.tolerance` has
the limits.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np
from torch import Tensor

from runner.core.errors import SamplerError
from runner.core.rng import derive_seed
from runner.interfaces import Sampler

log = logging.getLogger("runner")

ROWS, TOKENS = 4, 16
MAX_LOADS = 2  # of one version

Scores = Sequence[Sequence[float]]  # of each row, of all ids but the first


class SyncProbe:
    """Expected scores of `rows` by version.

    last_difference: the largest mean absolute difference of log-probabilities at the newest load, in nats
    """

    def __init__(self, rows: Sequence[Sequence[int]], limit: float) -> None:
        self.rows = tuple(tuple(row) for row in rows)
        self.limit = limit
        self.last_difference = 0.0
        self._expected: dict[int, Scores] = {}

    @classmethod
    def from_seed(cls, seed: int, vocabulary: int, limit: float) -> SyncProbe:
        """Rows of ids that are drawn from the run's seed."""
        draws = np.random.Generator(np.random.Philox(key=derive_seed(seed, "probe")))
        return cls(draws.integers(0, vocabulary, (ROWS, TOKENS)).tolist(), limit)

    def expect(self, version: int, scores: Scores) -> None:
        """Record the trainer's log-probabilities of the rows with these weights."""
        self._expected[version] = scores

    def drop_below(self, version: int) -> None:
        """Forget older versions."""
        self._expected = {one: scores for one, scores in self._expected.items() if one >= version}

    def load(self, sampler: Sampler, weights: Mapping[str, Tensor] | None, version: int) -> None:
        """Load these weights into a sampler, and once more if it then differs from the trainer.

        Raises SamplerError if they differ again, and what `load_weights` and `score` raise.
        """
        for once_more in reversed(range(MAX_LOADS)):
            sampler.load_weights(weights, version)
            engines = sampler.score(self.rows)
            self.last_difference = self.difference(engines, version)
            if self.last_difference <= self.limit:
                return
            who = self._farthest(engines, version)
            found = f"{who} differs from the trainer by {self.last_difference:.4g} after the sync of version {version}"
            if once_more:
                log.warning("%s (sampler.sync_logprob_tolerance=%g): sending the weights again", found, self.limit)
        raise SamplerError(
            f"{found}, twice: mean absolute difference of log-probabilities of {ROWS * (TOKENS - 1)} fixed tokens; "
            f"the limit is sampler.sync_logprob_tolerance={self.limit:g}\n"
            "  its samples would not come from these weights. Is its data type the model's (model.dtype, "
            "sampler.dtype)? Does its version load weights while it runs (docs/vllm.md)? To accept the "
            f"difference: sampler.sync_logprob_tolerance={self.last_difference * 2:.1g}"
        )

    def difference(self, engines: Sequence[Scores], version: int) -> float:
        """The largest mean absolute difference from the expected scores of a version, over engines.

        Infinite where an answer has not the rows' shape, or is no number.
        """
        wanted = self._expected[version]
        return max((mean_difference(scores, wanted) for scores in engines), default=math.inf)

    def _farthest(self, engines: Sequence[Scores], version: int) -> str:
        """Words for the engine with the largest difference; engines come in the order of samplers or ranks."""
        if len(engines) < 2:
            return "a sampler"
        off = [mean_difference(scores, self._expected[version]) for scores in engines]
        return f"sampler {off.index(max(off))} of 0 to {len(engines) - 1}"


def mean_difference(scores: Scores, wanted: Scores) -> float:
    """The mean absolute difference; infinite for rows of another shape, and where it is no number."""
    if [len(row) for row in scores] != [len(row) for row in wanted]:
        return math.inf
    pairs = list(zip(chain.from_iterable(scores), chain.from_iterable(wanted), strict=True))
    found = sum(abs(one - other) for one, other in pairs) / max(len(pairs), 1)
    return found if math.isfinite(found) else math.inf
