"""A job's rollout servers as rank 0's sampler: each loads the weights and samples a share of answers.

requests ──groups, balanced by tokens──▶ one task for each server ──HTTP──▶ answers ──checked──▶ all, in order
                                           │ it holds other weights: it loads them, and gets the same requests again
                                           └ no answer (dead, stopped): its successor gets them, with the same seeds

Requests carry their seeds, so that a step's answers are the same bytes from every server, also when repeated.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from runner.core.errors import SamplerError
from runner.core.http_client import CancellableRunner
from runner.distributed.work_partition import balance_by_cost, group_by_prompt
from runner.interfaces import Request, Rollout
from runner.interfaces.media import ImageReader
from runner.sampler.base import SamplingConfig
from runner.sampler.server.pool_metrics import PoolMetrics
from runner.sampler.server.protocol import AnswerLimits
from runner.sampler.server.rollout_client import ServerClient
from runner.weight_sync.weight_store import StoredWeights

T = TypeVar("T")
SILENCE_S = 30.0  # after which a server that sends nothing, or takes nothing, counts as stopped or disconnected


class SamplerPool:
    """A `Sampler`: it samples bit for bit what as many ranks on equal devices would with the same sampler."""

    def __init__(
        self,
        config: SamplingConfig,
        count: int,
        folder: Path,
        *,
        token: str,
        vocab_size: int,
        silence_s: float = SILENCE_S,
        images: ImageReader | None = None,
    ) -> None:
        """The `count` servers of a job; folder: of endpoint files; token: the job's; images: of prompts."""
        self.temperature, self.max_new_tokens = config.temperature, config.max_new_tokens
        self._timeout_s, self._metrics, self._runner = config.patience_s, PoolMetrics(), CancellableRunner()
        limits = AnswerLimits(vocab_size, config.max_new_tokens)
        self._clients = [
            ServerClient(at, folder, token, limits, self._metrics, silence_s=silence_s, images=images)
            for at in range(count)
        ]
        self._weights: StoredWeights | None = None
        self._longest: list[int | None] | None = None

    @property
    def max_model_len(self) -> int | None:
        """Most tokens of prompt and answer together that fit in all servers. Waits until all are there."""
        if self._longest is None:
            self._longest = self._on_each([client.max_model_len for client in self._clients])
        return min((one for one in self._longest if one is not None), default=None)

    def load_weights(self, tensors: Mapping[str, Tensor] | None, version: int) -> None:
        """Load a version of the weights into every server. Raises SamplerError where one does not."""
        if not isinstance(tensors, StoredWeights) or tensors.version != version:
            raise ValueError(f"rollout servers load version {version} from files, not from {tensors!r}")
        self._weights = tensors
        begin = time.monotonic()
        self._on_each([partial(client.load, tensors) for client in self._clients])
        self._metrics.add("load_s", time.monotonic() - begin)

    def sample(self, requests: Sequence[Request]) -> list[Rollout]:
        """One rollout per request, in their order.

        Raises SamplerError after `sampler.timeout_s`, or where answers are invalid; what a sampler raised, as
        RunnerError of its exit code.
        """
        weights, begin = self._held(), time.monotonic()
        members, costs = group_by_prompt(requests)
        owners = balance_by_cost(costs, len(self._clients))
        shares: list[list[int]] = [[] for _ in self._clients]
        for group, owner in zip(members, owners, strict=True):
            shares[owner].extend(group)
        busy = [(client, share) for client, share in zip(self._clients, shares, strict=True) if share]
        calls = [partial(client.sample, [requests[at] for at in share], weights) for client, share in busy]
        placed = dict(
            chain.from_iterable(
                zip(share, found, strict=True) for (_, share), found in zip(busy, self._on_each(calls), strict=True)
            )
        )
        tokens = sum(len(one.ids) for one in placed.values())
        self._metrics.record_batch(tokens, time.monotonic() - begin, max(map(len, shares)))
        return [placed[at] for at in range(len(requests))]

    def score(self, rows: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        """Log-probabilities of the rows by each engine of each server. Raises as `sample`."""
        weights = self._held()
        found = self._on_each([partial(client.score, rows, weights) for client in self._clients])
        return [engine for scores in found for engine in scores]

    def pop_metrics(self) -> dict[str, float]:
        """The metrics since the last call.

        tokens_per_s: of all servers; queue: the most requests of one at once; load_s; restarts of servers, resyncs
        of their weights, and shares rejected because they were invalid.
        """
        return self._metrics.pop()

    def release_memory(self) -> None:
        """Have the servers give up memory that they can do without."""
        self._on_each([client.release for client in self._clients])

    def close(self) -> None:
        """Cancel running requests; a thread that waits for an answer gets SamplerError at once.

        The servers keep running: the launcher ends them.
        """
        self._runner.cancel()

    def _held(self) -> StoredWeights:
        if self._weights is None:
            raise ValueError("the samplers have not loaded any weights yet")
        return self._weights

    def _on_each(self, calls: Sequence[Callable[[float], Coroutine[Any, Any, T]]]) -> list[T]:
        """The results of calls that run side by side; the first error cancels the rest."""
        deadline = time.monotonic() + self._timeout_s

        async def run() -> list[T]:
            tasks = [asyncio.ensure_future(call(deadline)) for call in calls]
            try:
                return list(await asyncio.gather(*tasks))
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

        try:
            return self._runner.run(run())
        except asyncio.CancelledError:
            raise SamplerError("the samplers are closed") from None
