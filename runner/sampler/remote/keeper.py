"""The sampler of a process with the weights that it was sent, and what it is asked for under them.

/load: files or addresses ──mapped──▶ their digest is the one announced? ─▶ sampler.load ─▶ held
/sample, /score: the weights meant are those held? ─▶ what the sampler gives, else the error Stale
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from runner.core.errors import SamplerError
from runner.interfaces import Sampler
from runner.sampler.remote.fetch import Fetched, Get, UnsharedError
from runner.sampler.remote.wire import STALE, Held, Json, Wrong, answered, requests_of
from runner.weight_sync.shelf import Shelved

log = logging.getLogger("runner")


class Keeper:
    """Does what a client asks, in the thread that has the sampler. What goes wrong is part of the answer."""

    def __init__(self, sampler: Sampler, get: Get) -> None:
        """get: how weights come from another machine."""
        self._sampler, self._fetched = sampler, Fetched(get)
        self._session = secrets.token_hex(8)
        self.held = self._nothing()
        self._last: tuple[str, Json] = ("", {})
        self.verbs: Mapping[str, Callable[[Json], Any]] = {
            "/load": self._load,
            "/sample": self._sample,
            "/score": self._score,
            "/release": self._release,
        }

    def health(self) -> Json:
        """What can be said at any time, from any thread."""
        return {"held": self._said(), "longest": self._sampler.max_model_len}

    def answer(self, verb: str, body: Json, key: str) -> Json:
        """What `verb` gives. `key`: that of a question whose answer was lost on its way, which is then given again.

        Raises SamplerFault where the sampler is gone, an engine without its workers: this process is to end, and its
        successor is asked.
        """
        if self._last[0] == key:
            return self._last[1]
        self._last = ("", {})
        try:
            found: Json = {"result": self.verbs[verb](body)}
        except _StaleError as error:
            found = {"error": {"kind": STALE, "message": str(error), "exit_code": SamplerError.exit_code}}
        except Exception as error:
            log.warning("%s failed", verb, exc_info=True)
            if isinstance(error, SamplerError) and verb != "/load":  # of which it may be the weights' way that failed
                raise
            found = {"error": Wrong.of(error).said()}
        found["held"] = self._said()
        if verb == "/sample" and "result" in found:
            self._last = (key, found)
        return found

    def close(self) -> None:
        """Give back the memory of what was fetched."""
        self._fetched.close()

    def _said(self) -> Json:
        return {"version": self.held.version, "digest": self.held.digest, "session": self.held.session}

    def _nothing(self) -> Held:
        return Held(-1, "", self._session)

    def _load(self, body: Json) -> None:
        version, digest = int(body["version"]), str(body["digest"])
        files = self._fetched.files(body["urls"]) if "urls" in body else _shared(body["files"])
        try:
            weights = Shelved(files, version)
            found = weights.digest
        except (OSError, SafetensorError) as error:
            raise SamplerError(f"the weights of version {version} cannot be read: {error}") from error
        if found != digest:
            self._fetched.close()  # to be had anew, what is the same in every version with it
            raise SamplerError(f"the weights of version {version} are not those that were sent: {found} for {digest}")
        self.held = self._nothing()  # while they change, and if that fails half-way
        self._sampler.load_weights(weights, version)
        self.held = Held(version, digest, self._session)
        self._fetched.drop_changed()

    def _sample(self, body: Json) -> list[Json]:
        self._check(body)
        return answered(self._sampler.sample(requests_of(body)))

    def _score(self, body: Json) -> list[list[list[float]]]:
        self._check(body)
        return self._sampler.score([tuple(row) for row in body["rows"]])

    def _release(self, _: Json) -> None:
        self._sampler.release_memory()

    def _check(self, body: Json) -> None:
        if not self.held.are(body["version"], body["digest"]):
            raise _StaleError(f"{self.held} is held, and version {body['version']} is meant")


def _shared(names: Sequence[str]) -> list[Path]:
    """Files that the trainer sees, too. Raises UnsharedError for one that is not there."""
    files = [Path(name) for name in names]
    if missing := [path for path in files if not path.exists()]:
        raise UnsharedError(f"{missing[0]} is not seen here: weights come over the network from now on")
    return files


class _StaleError(Exception):
    """Other weights are held than the client means."""
