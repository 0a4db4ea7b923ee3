"""One sampler that is only asked, and only believed, under the weights that are meant."""

from __future__ import annotations

import logging
import math
import socket
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

from runner.core.errors import SamplerError
from runner.core.rank_info import Host
from runner.interfaces import Request, Rollout
from runner.sampler.remote.check import InvalidError, Limits, checked, scores
from runner.sampler.remote.fetch import UnfetchedError, UnsharedError
from runner.sampler.remote.listening import Note
from runner.sampler.remote.offer import Offer
from runner.sampler.remote.remote import Counts, Remote, Reply
from runner.sampler.remote.window import Patience
from runner.sampler.remote.wire import STALE, Json, asked
from runner.weight_sync.shelf import Shelved

T = TypeVar("T")
Scores = list[list[list[float]]]  # by engine, row and id
DRIFT = 0.1  # nats, mean over the rows: what bfloat16 may add from one process to another; a wrong head is off by 3
TRIES = 2  # of what comes back wrong
PAUSE_S = 1.0  # before weights are fetched again
FAULTS = {kind.__name__: kind for kind in (SamplerError, UnfetchedError, UnsharedError)}  # of the weights' way
log = logging.getLogger("runner")


class Mark(NamedTuple):
    """What was said of rows under the weights of this digest."""

    digest: str
    rows: Sequence[Sequence[int]]
    said: Scores

    def distance(self, now: Scores) -> float:
        """The mean absolute difference, of the engine that is farthest off."""
        if len(now) != len(self.said):
            return math.inf
        pairs = [zip(chain(*one), chain(*other), strict=True) for one, other in zip(self.said, now, strict=True)]
        return max(fmean([abs(a - b) for a, b in pair] or [0.0]) for pair in pairs)


class Synced:
    """The sampler behind `remote`. What it says under other weights is never used: it loads those meant, and is asked
    again."""

    def __init__(self, remote: Remote, offer: Offer, limits: Limits, counts: Counts) -> None:
        self._remote, self._offer, self._limits, self._counts = remote, offer, limits, counts
        self._loaded = ""  # the session that has loaded the weights meant
        self._apart = ""  # the session that is on this machine and does not see its files, as in a container
        self._mark = Mark("", (), [])

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

    def score(self, rows: Sequence[Sequence[int]], weights: Shelved, patience: Patience) -> Scores:
        """Its log-probabilities, by engine and row, by which it is known until the next version. Raises as `sample`."""
        found = self._valid("/score", _rows(rows), partial(scores, rows=rows), weights, patience)
        self._mark = Mark(weights.digest, rows, found)
        return found

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
        raise SamplerError(f"{self._remote}: {reason}; {TRIES} times over, so it is ill: look into {self._remote.log}")

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
                raise SamplerError(f"{words}, although it loaded that: is it a sampler of another job, too?")
            self._counts.add("resyncs")
            log.warning("%s: it loads them again", words)
            self._load_again(weights, patience)

    def _load_again(self, weights: Shelved, patience: Patience) -> None:
        """Have it hold these in the middle of their version, and say of the rows that it was last scored with what was
        said of them then. Raises SamplerFault."""
        for _ in range(TRIES):
            self.load(weights, patience)
            off = self._off(weights, patience)
            if off <= DRIFT:
                return
            words = f"{self._remote} is {off:.4g} off what was said under version {weights.version} before"
            log.warning("%s it was loaded again: it is not used", words)
        raise SamplerError(f"{words} it was loaded again, {TRIES} times over (at most {DRIFT:g}): it is ill")

    def _off(self, weights: Shelved, patience: Patience) -> float:
        """How far it is from its mark (mean |log-prob.|); 0 where it has none of these weights, or holds others again,
        which whatever it is asked next will show."""
        if self._mark.digest != weights.digest:
            return 0.0
        asked = {**_rows(self._mark.rows), "version": weights.version, "digest": weights.digest}
        reply = self._remote.ask("/score", lambda _: asked, patience)
        if reply.wrong is not None:
            if reply.wrong.kind == STALE:
                return 0.0
            raise reply.wrong.error(str(self._remote))
        try:
            return self._mark.distance(scores(reply.result, self._mark.rows))
        except InvalidError:
            return math.inf

    def _fault(self, weights: Shelved, patience: Patience) -> SamplerError | None:
        """What goes wrong with the weights as it loads them once, if anything does; all else is raised."""
        reply = self._remote.ask("/load", partial(self._announced, weights), patience)
        if reply.wrong is None:
            if reply.held.are(weights.version, weights.digest):
                self._loaded = reply.held.session
                return None
            return SamplerError(f"{self._remote} loaded version {weights.version}, and holds {reply.held}")
        if reply.wrong.kind not in FAULTS:
            raise reply.wrong.error(str(self._remote))
        fault = FAULTS[reply.wrong.kind](f"{self._remote}: {reply.wrong.message}")
        if isinstance(fault, UnsharedError):
            self._apart = reply.held.session
        return fault

    def _announced(self, weights: Shelved, note: Note) -> Json:
        """What to load, and from where, by the sampler of this note."""
        said: Json = {"version": weights.version, "digest": weights.digest}
        if note.machine == Host.current() and note.session != self._apart:
            return said | {"files": [str(path) for path in weights.files]}
        try:
            return said | {"urls": self._offer.urls(_address_towards(note.address), weights.files)}
        except OSError as error:
            raise SamplerError(f"the weights of version {weights.version} cannot be offered: {error}") from error


def _rows(rows: Sequence[Sequence[int]]) -> Json:
    return {"rows": [list(row) for row in rows]}


def _address_towards(address: tuple[str, int]) -> str:
    """The address of this machine from which packets go to another one; none is sent."""
    family, kind, *_, there = socket.getaddrinfo(*address, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(there)
        return str(probe.getsockname()[0])
