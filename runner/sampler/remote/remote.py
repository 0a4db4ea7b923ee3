"""One sampler as a rank sees it: asked over HTTP, looked for again where it does not answer.

its note ─▶ connect ─▶ ask ─▶ signs of life … answer
    ▲ again, after a pause ◀── refused, cut, silent, no JSON ──┘     until the patience is at its end: SamplerFault
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from runner.core.bounded_text import parse_json
from runner.core.errors import SamplerError
from runner.run_dir.folder import display_path
from runner.sampler.remote.listening import Note, path_of
from runner.sampler.remote.window import Patience
from runner.sampler.remote.wire import LARGEST_BYTES, Held, Json, Wrong, authorization

SUMS = ("load_s", "restarts", "resyncs", "rejected")


class Counts:
    """Added to by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums = dict.fromkeys(SUMS, 0.0)
        self._tokens, self._seconds, self._queue = 0, 0.0, 0
        self._devices: dict[int, Mapping[str, float]] = {}

    def add(self, name: str, amount: float = 1) -> None:
        """So much more of it."""
        with self._lock:
            self._sums[name] += amount

    def drawn(self, tokens: int, seconds: float, queue: int) -> None:
        """Answers have come. queue: the most that one sampler was asked for at once."""
        with self._lock:
            self._tokens += tokens
            self._seconds += seconds
            self._queue = max(self._queue, queue)

    def watched(self, index: int, numbers: Mapping[str, float]) -> None:
        """What the device of sampler `index` was found to be doing; nothing where it was not looked at since."""
        with self._lock:
            self._devices[index] = {**self._devices.get(index, {}), **numbers}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds that the block takes."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self.add(name, time.monotonic() - begin)

    def taken(self) -> dict[str, float]:
        """The numbers, which then begin anew."""
        with self._lock:
            found = dict(self._sums)
            if self._seconds:
                found |= {"tokens_per_s": self._tokens / self._seconds, "queue": float(self._queue)}
            self._sums = dict.fromkeys(SUMS, 0.0)
            found |= _together(self._devices.values())
            self._tokens, self._seconds, self._queue = 0, 0.0, 0
            self._devices = {}
        return found


def _together(devices: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Of all samplers: the mean of what is in percent, else the greatest, e.g. the fullest device's memory."""
    found = {name: [one[name] for one in devices if name in one] for one in devices for name in one}
    return {
        name: sum(values) / len(values) if name.endswith("_percent") else max(values) for name, values in found.items()
    }


CONNECT_S = 5.0
PAUSES_S = (0.1, 0.2, 0.5, 1.0)  # between two tries; the last one for all further ones
BLOCK_BYTES = 1 << 20
log = logging.getLogger("runner")


class UnansweredError(Exception):
    """A sampler could not be asked, or gave nothing that is an answer; it may later."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a sampler holds, and what it gave: a result, or what went wrong. device: what that was found to be doing."""

    held: Held
    result: Any
    wrong: Wrong | None
    device: Mapping[str, float]

    @classmethod
    def of(cls, content: bytes) -> Reply:
        """Read it. Raises UnansweredError for what is none."""
        try:
            body = parse_json(content)
            held, wrong = body["held"], body.get("error")
            device = {name: float(value) for name, value in body.get("device", {}).items()}
            return cls(Held(**held), body.get("result"), None if wrong is None else Wrong(**wrong), device)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UnansweredError(f"what it says is no answer: {content[:80]!r}") from error


class Remote:
    """The sampler `index` of a job, whichever process that is at the time."""

    def __init__(self, index: int, notes: Path, token: str, counts: Counts, *, silence_s: float) -> None:
        self.index, self._path, self._token, self._silence_s = index, path_of(notes, index), token, silence_s
        self._counts = counts
        self._session, self._where = "", "not started"

    def __str__(self) -> str:
        return f"sampler {self.index} ({self._where})"

    @property
    def log(self) -> str:
        """Where its words are."""
        return display_path(self._path.with_suffix(".log"))

    def ask(self, verb: str, body: Callable[[Note], Json], patience: Patience) -> Reply:
        """What it answers, under the patience. Raises SamplerFault at its end.

        body: what to ask, made for each try as the sampler may then be elsewhere
        """
        return self._kept_asking(lambda note: self._asked(note, verb, body(note), patience), patience)

    def health(self, patience: Patience) -> Json:
        """What it says of itself, as soon as it is there. Raises SamplerFault at the end of the patience."""
        return self._kept_asking(lambda note: _json(self._exchange(note, "GET", "/health", None, patience)), patience)

    def _kept_asking(self, ask: Callable[[Note], Any], patience: Patience) -> Any:
        tries, begin = 0, time.monotonic()
        level = logging.WARNING if self._session else logging.INFO  # at first it may still be starting
        while True:
            try:
                found = ask(self._note())
            except UnansweredError as error:
                self._miss(error, tries, level, patience)
            else:
                if tries:
                    log.log(level, "%s answers after %.1f s", self, time.monotonic() - begin)
                return found
            patience.pause(PAUSES_S[min(tries, len(PAUSES_S) - 1)])
            tries += 1

    def _miss(self, error: UnansweredError, tries: int, level: int, patience: Patience) -> None:
        if not patience.left():
            remedy = f"look into {self.log}, or give it longer: sampler.timeout_s"
            raise SamplerError(f"{self} gave no answer in {patience.timeout_s:g} s: {error}; {remedy}") from error
        if not tries:
            log.log(level, "%s does not answer, and is waited for: %s", self, str(error))  # without its frames

    def _note(self) -> Note:
        try:
            note = Note.read(self._path)
        except FileNotFoundError as error:
            raise UnansweredError("it has not said yet where it is") from error
        except (OSError, ValueError) as error:
            raise UnansweredError(str(error)) from error
        self._where = note.url
        return note

    def _asked(self, note: Note, verb: str, body: Json, patience: Patience) -> Reply:
        reply = Reply.of(self._exchange(note, "POST", verb, json.dumps(body).encode(), patience))
        if self._session and reply.held.session != self._session:
            self._counts.add("restarts")
            log.warning("%s is another process than before", self)
        self._session = reply.held.session
        self._counts.watched(self.index, reply.device)
        return reply

    def _exchange(self, note: Note, method: str, path: str, body: bytes | None, patience: Patience) -> bytes:
        host, port = note.address
        connection = HTTPConnection(host, port, timeout=max(min(CONNECT_S, patience.left()), 0.001))
        try:
            connection.connect()
            with patience.over(connection.sock):
                connection.sock.settimeout(max(min(self._silence_s, patience.left()), 0.001))
                connection.request(method, path, body, {"Authorization": authorization(self._token)})
                return _read(connection, patience)
        except TimeoutError as error:
            raise UnansweredError("it gives no sign of life") from error
        except (OSError, HTTPException) as error:
            patience.left()  # the cut may be our own
            raise UnansweredError(str(error) or type(error).__name__) from error
        finally:
            connection.close()


def _read(connection: HTTPConnection, patience: Patience) -> bytes:
    """The answer; what comes before it are signs of life."""
    content = bytearray()
    with connection.getresponse() as response:  # which has the socket, where the connection ends after it
        while part := response.read1(BLOCK_BYTES):
            content += part if content else part.lstrip()
            if len(content) > LARGEST_BYTES:
                raise UnansweredError(f"its answer is above {LARGEST_BYTES} bytes")
            if not patience.left():
                raise UnansweredError("it is still at work")
    if response.status != 200:
        raise UnansweredError(f"status {response.status}: {bytes(content[:200]).decode(errors='replace').strip()}")
    return bytes(content)


def _json(content: bytes) -> Any:
    try:
        return parse_json(content)
    except ValueError as error:
        raise UnansweredError(f"what it says is no answer: {content[:80]!r}") from error
