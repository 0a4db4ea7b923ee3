"""One sampler that is only asked, and only believed, under the weights that are meant."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from runner.errors import SamplerFault
from runner.protocols import Request, Rollout
from runner.sampler.remote.check import InvalidError, Limits, checked, scores
from runner.sampler.remote.counts import Counts
from runner.sampler.remote.fetch import UnfetchedError, UnsharedError
from runner.sampler.remote.notes import Machine, Note
from runner.sampler.remote.offer import Offer
from runner.sampler.remote.patience import Patience
from runner.sampler.remote.remote import Remote, Reply
from runner.sampler.remote.wire import STALE, Json, asked
from runner.shelf import Shelved

T = TypeVar("T")
TRIES = 2  # of what comes back wrong
PAUSE_S = 1.0  # before weights are fetched again
FAULTS = {kind.__name__: kind for kind in (SamplerFault, UnfetchedError, UnsharedError)}  # of the weights' way
log = logging.getLogger("runner")


class Synced:
    """The sampler behind `remote`. What it says under other weights is never used: it loads those meant, and is asked
    again."""

    def __init__(self, remote: Remote, offer: Offer, limits: Limits, counts: Counts) -> None:
        self._remote, self._offer, self._limits, self._counts = remote, offer, limits, counts
        self._loaded = ""  # the session that has loaded the weights meant
        self._apart = ""  # the session that is on this machine and does not see its files, as in a container

    def load(self, weights: Shelved, patience: Patience) -> None:
        """Have it hold these. Raises SamplerFault where it cannot, or says that it holds others."""
        tried, said = 0, ""
        while (fault := self._fault(weights, patience)) is not None:
            tried += not isinstance(fault, UnfetchedError | UnsharedError)
            if tried == TRIES or not patience.left():
                raise fault
            if str(fault) != said:
                log.warning("%s; once more", fault)
                said = str(fault)
            patience.pause(0 if isinstance(fault, UnsharedError) else PAUSE_S)

    def sample(self, requests: Sequence[Request], weights: Shelved, patience: Patience) -> list[Rollout]:
        """Its answers, which can be those that were asked for. Raises SamplerFault; what it raised, as RunnerError."""
        read = partial(checked, requests=requests, version=weights.version, limits=self._limits)
        return self._valid("/sample", asked(requests), read, weights, patience)

    def score(self, rows: Sequence[Sequence[int]], weights: Shelved, patience: Patience) -> list[list[list[float]]]:
        """Its log-probabilities, by engine and row. Raises as `sample`."""
        body = {"rows": [list(row) for row in rows]}
        return self._valid("/score", body, partial(scores, rows=rows), weights, patience)

    def release(self, patience: Patience) -> None:
        """Have it give up what it can do without."""
        reply = self._remote.ask("/release", lambda _: {}, patience)
        if reply.wrong is not None:
            raise reply.wrong.error(str(self._remote))

    def _valid(self, verb: str, body: Json, read: Callable[[Any], T], weights: Shelved, patience: Patience) -> T:
        for tried in range(TRIES):
            reply = self._meant(verb, {**body, "tried": tried}, weights, patience)
            try:
                return read(reply.result)
            except InvalidError as error:
                reason = error
            self._counts.add("rejected")
            log.warning("%s gave what cannot be: %s; its answers are not used", self._remote, reason)
        raise SamplerFault(f"{self._remote}: {reason}; {TRIES} times over, so it is ill: look into {self._remote.log}")

    def _meant(self, verb: str, body: Json, weights: Shelved, patience: Patience) -> Reply:
        """What it says under these weights."""
        lied, meant = 0, {**body, "version": weights.version, "digest": weights.digest}
        while True:
            reply = self._remote.ask(verb, lambda _: meant, patience)
            if reply.wrong is None and reply.held.are(weights.version, weights.digest):
                return reply
            if reply.wrong is not None and reply.wrong.kind != STALE:
                raise reply.wrong.error(str(self._remote))
            words = f"{self._remote} holds {reply.held}, where version {weights.version} is meant"
            lied += reply.held.session == self._loaded
            if lied == TRIES:
                raise SamplerFault(f"{words}, although it loaded that: is it a sampler of another job, too?")
            self._counts.add("resyncs")
            log.warning("%s: it loads them again", words)
            self.load(weights, patience)

    def _fault(self, weights: Shelved, patience: Patience) -> SamplerFault | None:
        """What goes wrong with the weights as it loads them once, if anything does; all else is raised."""
        reply = self._remote.ask("/load", partial(self._announced, weights), patience)
        if reply.wrong is None:
            if reply.held.are(weights.version, weights.digest):
                self._loaded = reply.held.session
                return None
            return SamplerFault(f"{self._remote} loaded version {weights.version}, and holds {reply.held}")
        if reply.wrong.kind not in FAULTS:
            raise reply.wrong.error(str(self._remote))
        fault = FAULTS[reply.wrong.kind](f"{self._remote}: {reply.wrong.message}")
        if isinstance(fault, UnsharedError):
            self._apart = reply.held.session
        return fault

    def _announced(self, weights: Shelved, note: Note) -> Json:
        """What to load, and from where, by the sampler of this note."""
        said: Json = {"version": weights.version, "digest": weights.digest}
        if note.machine == Machine.here() and note.session != self._apart:
            return said | {"files": [str(path) for path in weights.files]}
        try:
            return said | {"urls": self._offer.urls(_address_towards(note.address), weights.files)}
        except OSError as error:
            raise SamplerFault(f"the weights of version {weights.version} cannot be offered: {error}") from error


def _address_towards(address: tuple[str, int]) -> str:
    """The address of this machine from which packets go to another one; none is sent."""
    family, kind, *_, there = socket.getaddrinfo(*address, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(there)
        return str(probe.getsockname()[0])
