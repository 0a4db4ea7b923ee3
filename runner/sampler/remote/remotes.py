"""The samplers of a job as rank 0's sampler: each loads the weights, and draws its share of the answers.

requests ──groups, balanced by tokens──▶ a thread for each sampler ──HTTP──▶ answers ──checked──▶ all, in order
                                           │ it holds other weights than meant: it loads them, and is asked again
                                           └ it does not answer (dead, stopped, cut off): its successor is, same seeds
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from runner.core.errors import SamplerError
from runner.distributed.work_partition import balance_by_cost, group_by_prompt
from runner.interfaces import Request, Rollout
from runner.sampler.base import SamplingConfig
from runner.sampler.remote.backends import Collectives
from runner.sampler.remote.check import Limits
from runner.sampler.remote.collective import PairServer
from runner.sampler.remote.offer import Offer
from runner.sampler.remote.remote import Counts, Remote
from runner.sampler.remote.synced import Synced
from runner.sampler.remote.window import Patience
from runner.weight_sync.shelf import Shelved

T = TypeVar("T")
SILENCE_S = 30.0  # after which a sampler that gives no sign of life is taken for stopped, or cut off


class Remotes:
    """A `Sampler`: it draws bit for bit what as many ranks on equal devices would draw with the same sampler."""

    def __init__(
        self,
        config: SamplingConfig,
        count: int,
        notes: Path,
        *,
        token: str,
        vocabulary: int,
        silence_s: float = SILENCE_S,
        collectives: Collectives | None = None,
    ) -> None:
        """notes: the folder in which `count` samplers say where they are; token: the job's; vocabulary: its size;
        collectives: by which weights go to other machines, None = over HTTP."""
        self.temperature, self.max_new_tokens = config.temperature, config.max_new_tokens
        self._timeout_s = config.patience_s
        server = None if collectives is None else partial(PairServer, collectives)
        self._counts, self._offer = Counts(), Offer(token, server)
        self._remotes = [Remote(at, notes, token, self._counts, silence_s=silence_s) for at in range(count)]
        limits = Limits(vocabulary, config.max_new_tokens)
        self._samplers = [Synced(remote, self._offer, limits, self._counts) for remote in self._remotes]
        self._pool = ThreadPoolExecutor(count, "sampler")
        self._weights: Shelved | None = None
        self._longest: list[int | None] | None = None
        self._open: set[Patience] | None = set()  # None: closed
        self._lock = threading.Lock()

    @property
    def max_model_len(self) -> int | None:
        """Most tokens of prompt and answer together that all samplers have room for. Waits for them to be there."""
        if self._longest is None:
            said = self._each([remote.health for remote in self._remotes])
            self._longest = [one.get("longest") for one in said]
        return min((one for one in self._longest if one is not None), default=None)

    def load_weights(self, tensors: Mapping[str, Tensor] | None, version: int) -> None:
        """Have every sampler load a version of the shelf. Raises SamplerFault where one does not."""
        if not isinstance(tensors, Shelved) or tensors.version != version:
            raise ValueError(f"samplers of their own load version {version} from files of the shelf, not {tensors!r}")
        self._weights = tensors
        self._offer.clear()
        with self._counts.timed("load_s"):
            self._each([partial(sampler.load, tensors) for sampler in self._samplers])

    def sample(self, requests: Sequence[Request]) -> list[Rollout]:
        """One rollout per request, in their order. Raises SamplerFault after `sampler.timeout_s`, or where answers
        cannot be; what a sampler raised, as RunnerError of its exit code."""
        weights, begin = self._held(), time.monotonic()
        members, costs = group_by_prompt(requests)
        owners = balance_by_cost(costs, len(self._samplers))
        hands: list[list[int]] = [[] for _ in self._samplers]
        for group, owner in zip(members, owners, strict=True):
            hands[owner].extend(group)
        busy = [(sampler, hand) for sampler, hand in zip(self._samplers, hands, strict=True) if hand]
        drawn = self._each([partial(s.sample, [requests[at] for at in hand], weights) for s, hand in busy])
        placed = {
            at: one for (_, hand), some in zip(busy, drawn, strict=True) for at, one in zip(hand, some, strict=True)
        }
        tokens = sum(len(one.ids) for one in placed.values())
        self._counts.drawn(tokens, time.monotonic() - begin, max(map(len, hands)))
        return [placed[at] for at in range(len(requests))]

    def score(self, rows: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        """What each engine of each sampler says of the rows. Raises as `sample`."""
        weights = self._held()
        found = self._each([partial(sampler.score, rows, weights) for sampler in self._samplers])
        return [engine for sampler in found for engine in sampler]

    def pop_metrics(self) -> dict[str, float]:
        """Since it was last asked: tokens_per_s, of all samplers; queue, the most answers asked of one at once; load_s;
        restarts of samplers, resyncs of their weights, and shares rejected because they could not be answers."""
        return self._counts.taken()

    def release_memory(self) -> None:
        """Have the samplers give up what they can do without."""
        self._each([sampler.release for sampler in self._samplers])

    def close(self) -> None:
        """Ask for nothing any more; who waits for an answer in another thread gets a SamplerFault at once. The samplers
        belong to the launcher."""
        with self._lock:
            waiting, self._open = self._open or set(), None
        for patience in waiting:
            patience.give_up()
        self._pool.shutdown()
        self._offer.close()

    def _held(self) -> Shelved:
        if self._weights is None:
            raise ValueError("the samplers were not given any weights yet")
        return self._weights

    def _each(self, work: Sequence[Callable[[Patience], T]]) -> list[T]:
        """What all of it gives, done side by side; the first error ends the rest."""
        patience = Patience(self._timeout_s)
        with self._lock:
            if self._open is None:
                raise SamplerError("the samplers are not asked any more")
            self._open.add(patience)
            futures = [self._pool.submit(one, patience) for one in work]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            failed = [error for future in futures if future in done and (error := future.exception()) is not None]
            if failed:
                raise failed[0]
            return [future.result() for future in futures]
        finally:
            patience.give_up()
            wait(futures)
            with self._lock:
                if self._open is not None:
                    self._open.discard(patience)
