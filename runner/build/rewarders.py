"""Pools of a reward that processes of their own have (launch.rewarders), as a rank asks them.

call ──▶ a rewarder of which a worker is free ──HTTP──▶ its pool of the same number ──▶ Scored
         └ it does not answer (dead, stopped, cut off): its successor is asked the same
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from runner.protocols import Peers
from runner.reward.calls import VERB, Calls, asked, scored_of
from runner.reward.faults import Scored
from runner.reward.output import Output
from runner.reward.pool import Target
from runner.sampler.remote.counts import Counts
from runner.sampler.remote.patience import Patience
from runner.sampler.remote.remote import Remote
from runner.sampler.remote.remotes import SILENCE_S

LOST_S = 900.0  # for a rewarder to be found lost, for another to begin, and to import the user's file


class Rewarders:
    """The job's, as this rank asks them. Called, it makes what stands for a pool: the n-th that is made here is the
    n-th that each of them has made."""

    def __init__(self, number: int, notes: Path, token: str, peers: Peers) -> None:
        """notes: the folder in which `number` rewarders say where they are; peers: the ranks, which all ask them."""
        words = {"role": "rewarder", "remedy": ""}
        remotes = [Remote(at, notes, token, Counts(), silence_s=SILENCE_S, **words) for at in range(number)]
        first = peers.rank % number
        self._remotes = [*remotes[first:], *remotes[:first]]
        self._ranks, self._numbers = peers.size, count()

    def __call__(self, target: Target, workers: int, timeout_s: float, output: Output) -> Calls:
        """See `reward.pool.Make`; nothing is printed here."""
        waits_s = LOST_S + 2 * timeout_s * self._ranks  # for those that ask before, each of which may be asked twice
        return Afar(next(self._numbers), self._remotes, workers, waits_s)


class Afar:
    """Pool `number` of every rewarder, each with so many workers. `call` may be used by as many threads at a time."""

    def __init__(self, number: int, remotes: Sequence[Remote], workers: int, timeout_s: float) -> None:
        self._number, self._timeout_s = number, timeout_s
        self.workers = workers * len(remotes)
        self._free: SimpleQueue[Remote] = SimpleQueue()
        for remote in [*remotes] * workers:
            self._free.put(remote)

    def start(self) -> None:
        """Each rewarder has started its own, or says why it cannot: then the launcher ends the job."""

    def call(self, arguments: Mapping[str, Any], size: int, seed: int) -> Scored:
        """See `Pool`. Raises SamplerFault where no answer comes; what a rewarder raised, as RunnerError."""
        body = asked(self._number, arguments, size, seed)
        remote = self._free.get()
        try:
            reply = remote.ask(VERB, lambda _: body, Patience(self._timeout_s))
        finally:
            self._free.put(remote)
        if reply.wrong is not None:
            raise reply.wrong.error(str(remote))
        return scored_of(reply.result)

    def close(self) -> None:
        """The rewarders belong to the launcher."""
