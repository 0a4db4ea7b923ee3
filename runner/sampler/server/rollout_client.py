"""Client of one rollout server: retries until the server holds the weights; uses no other answer.

its endpoint ─▶ connect ─▶ send ─▶ line feeds … answer ─▶ of the requested weights, and valid? ─▶ used
    ▲ again, after a pause ◀── refused, cut, silent, unreadable ──┘     until the deadline: SamplerError
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

import numpy as np
from aiohttp import ClientError

from runner.core.errors import SamplerError
from runner.core.http_client import failure_reason, request
from runner.core.untrusted_text import parse_json, shorten
from runner.interfaces import Request, Rollout
from runner.interfaces.media import ImageReader
from runner.run_dir.folder import display_path
from runner.sampler.server.pool_metrics import PoolMetrics
from runner.sampler.server.protocol import (
    ADD_IMAGE,
    LOAD,
    MAX_BODY_BYTES,
    PROTOCOL,
    RELEASE,
    SAMPLE,
    SCORE,
    STALE,
    AnswerLimits,
    Array,
    Endpoint,
    HeldWeights,
    InvalidAnswerError,
    Json,
    ServerError,
    WeightFile,
    decode,
    decode_rollouts,
    decode_scores,
    encode,
    encode_requests,
    encode_rows,
    endpoint_path,
)
from runner.weight_sync.sync_probe import mean_difference
from runner.weight_sync.weight_store import StoredWeights

T = TypeVar("T")
Scores = list[list[list[float]]]  # by engine, row and id
PAUSES_S = (0.1, 0.2, 0.5, 1.0)  # between two tries; the last one for all further ones
DRIFT = 0.1  # nats, mean over the rows: what bfloat16 may add from one process to another; a wrong head is off by 3
TRIES = 2  # of an answer that is invalid, and of weights that are refused
log = logging.getLogger("runner")


class UnansweredError(Exception):
    """A server was not reached, or sent nothing that is an answer; it may later."""


class Fingerprint(NamedTuple):
    """The scores that a server gave to rows under the weights of this digest."""

    digest: str
    rows: Sequence[Sequence[int]]
    scores: Scores

    def distance(self, now: Scores) -> float:
        """The mean absolute difference, of the engine that is farthest off."""
        if len(now) != len(self.scores):
            return math.inf
        return max(mean_difference(one, other) for one, other in zip(now, self.scores, strict=True))


@dataclass(frozen=True, slots=True)
class Reply:
    """A server's response: what it holds, its header and arrays, or its error."""

    held: HeldWeights
    header: Json
    arrays: list[Array]
    error: ServerError | None

    @classmethod
    def parse(cls, body: bytes) -> Reply:
        """Read it. Raises UnansweredError for anything else."""
        try:
            header, arrays = decode(body)
            error = header.get("error")
            return cls(HeldWeights(**header["held"]), header, arrays, None if error is None else ServerError(**error))
        except (ValueError, KeyError, TypeError) as error:
            raise _unreadable(body) from error


class ServerClient:
    """Client of one rollout server, whichever process that is at the time.

    Retries until the server holds the requested weights, and never uses an answer under others. All deadlines are times
    of `time.monotonic`.
    """

    def __init__(
        self,
        index: int,
        folder: Path,
        token: str,
        limits: AnswerLimits,
        metrics: PoolMetrics,
        *,
        silence_s: float,
        images: ImageReader | None = None,
    ) -> None:
        """A server of the job in `folder`, where endpoint files and logs are.

        silence_s: without a byte, after which a server counts as stopped; images: those of prompts
        """
        self._images = images
        self._name, self._path = f"sampler {index}", endpoint_path(folder, index)
        self._limits, self._metrics = limits, metrics
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/octet-stream"}
        self._log_file, self._silence_s = display_path(self._path.with_suffix(".log")), silence_s
        self._session, self._url = "", "not started"
        self._loaded = ""  # the session that has loaded the requested weights
        self._fingerprint = Fingerprint("", (), [])

    def __str__(self) -> str:
        return f"{self._name} ({self._url})"

    async def max_model_len(self, deadline: float) -> int | None:
        """Most tokens of a prompt and its answer, as soon as the server is there. Raises SamplerError."""

        async def ask() -> Json:
            content = await self._exchange("GET", "/health", None, deadline)
            try:
                found = parse_json(content)
                if found["protocol"] == PROTOCOL:
                    return dict(found)
            except (ValueError, KeyError, TypeError):
                pass
            raise _unreadable(content)

        return (await self._retry(ask, deadline))["max_model_len"]

    async def load(self, weights: StoredWeights, deadline: float) -> None:
        """Load weights.

        Raises SamplerError where the server cannot, and what the sampler raised, as RunnerError.
        """
        for last in (False, True):
            error = await self._load_once(weights, deadline)
            if error is None:
                return
            if last:
                raise error
            log.warning("%s; the weights are sent again", error)

    async def sample(self, requests: Sequence[Request], weights: StoredWeights, deadline: float) -> list[Rollout]:
        """Valid answers to the requests. Raises SamplerError, and what the sampler raised, as RunnerError."""

        def read(reply: Reply) -> list[Rollout]:
            return decode_rollouts(reply.header, reply.arrays, requests, weights.version, self._limits)

        return await self._valid(SAMPLE, partial(encode_requests, requests), read, weights, deadline)

    async def score(self, rows: Sequence[Sequence[int]], weights: StoredWeights, deadline: float) -> Scores:
        """Log-probabilities by engine and row, which are the server's fingerprint until the next version.

        Raises as `sample`.
        """
        read = partial(_read_scores, rows)
        found = await self._valid(SCORE, partial(encode_rows, rows), read, weights, deadline)
        self._fingerprint = Fingerprint(weights.digest, rows, found)
        return found

    async def release(self, deadline: float) -> None:
        """Make the server free memory that it does not need now."""
        reply = await self._post(RELEASE, encode({}), deadline)
        if reply.error is not None:
            raise reply.error.to_exception(str(self))

    async def _valid(
        self,
        verb: str,
        body: Callable[[Mapping[str, Any]], bytes],
        read: Callable[[Reply], T],
        weights: StoredWeights,
        deadline: float,
    ) -> T:
        for attempt in range(TRIES):
            meant = {"version": weights.version, "digest": weights.digest, "attempt": attempt}
            reply = await self._post_under(verb, body(meant), weights, deadline)
            try:
                return read(reply)
            except InvalidAnswerError as error:
                reason = error
            self._metrics.add("rejected")
            log.warning("%s returned an invalid response, which is not used: %s", self, reason)
        raise SamplerError(f"{self} returned {TRIES} invalid responses: {reason}; see {self._log_file}")

    async def _post_under(self, verb: str, body: bytes, weights: StoredWeights, deadline: float) -> Reply:
        """The reply under these weights; where the server holds others, it loads these first."""
        wrong = 0
        while True:
            reply = await self._post(verb, body, deadline)
            if reply.error is None and reply.held.match(weights.version, weights.digest):
                if not (missing := reply.header.get("missing")):
                    return reply
                await self._send_images(missing, deadline)
                continue
            if reply.error is not None and reply.error.kind != STALE:
                raise reply.error.to_exception(str(self))
            text = f"{self} has {reply.held}, but version {weights.version} was requested"
            wrong += reply.held.session == self._loaded
            if wrong == TRIES:
                raise SamplerError(f"{text}, although it loaded that version: does another job use it too?")
            self._metrics.add("resyncs")
            log.warning("%s; loading that version again", text)
            await self._reload(weights, deadline)

    async def _send_images(self, missing: Sequence[int], deadline: float) -> None:
        """Send images that the server does not have. Raises RunnerError, also what the server raised."""
        assert self._images is not None
        for entry in self._images.entries(missing):
            content = np.frombuffer(self._images.image_bytes(entry.id), np.uint8)
            reply = await self._post(ADD_IMAGE, encode({"id": entry.id, "several": entry.several}, content), deadline)
            if reply.error is not None:
                raise reply.error.to_exception(str(self))

    async def _reload(self, weights: StoredWeights, deadline: float) -> None:
        """Load in the middle of a version, and check that the server scores rows as it did before."""
        for _ in range(TRIES):
            await self.load(weights, deadline)
            distance = await self._distance(weights, deadline)
            if distance <= DRIFT:
                return
            text = f"{self} differs by {distance:.4g} from its earlier scores of version {weights.version}"
            log.warning("%s after a reload: it is not used", text)
        raise SamplerError(f"{text} after {TRIES} reloads (limit {DRIFT:g}); see {self._log_file}")

    async def _distance(self, weights: StoredWeights, deadline: float) -> float:
        """Distance from its fingerprint (mean |log-prob.|); 0 where it has none of these weights.

        Also 0 where it holds others again, which its next reply shows.
        """
        if self._fingerprint.digest != weights.digest:
            return 0.0
        rows = self._fingerprint.rows
        body = encode_rows(rows, {"version": weights.version, "digest": weights.digest})
        reply = await self._post(SCORE, body, deadline)
        if reply.error is not None:
            if reply.error.kind == STALE:
                return 0.0
            raise reply.error.to_exception(str(self))
        try:
            return self._fingerprint.distance(_read_scores(rows, reply))
        except InvalidAnswerError:
            return math.inf

    async def _load_once(self, weights: StoredWeights, deadline: float) -> SamplerError | None:
        """Load; the files that the server does not see are sent to it. Returns what is worth another try."""
        try:
            files = {str(path): WeightFile.at(path) for path in weights.files}
        except OSError as error:
            raise SamplerError(f"the weights of version {weights.version} cannot be read: {error}") from error
        listed = [[path, file.size, file.mtime_ns] for path, file in files.items()]
        body = encode({"version": weights.version, "digest": weights.digest, "files": listed})
        sent_to = ""
        while True:
            reply = await self._post(LOAD, body, deadline)
            missing = reply.header.get("missing")
            if missing is None:
                break
            if sent_to == reply.held.session:
                return SamplerError(f"{self} does not have the weights that were sent to it: {missing[0]}")
            if await self._send_files({path: files[path] for path in missing}, weights.version, deadline):
                sent_to = reply.held.session
        if reply.error is None and reply.held.match(weights.version, weights.digest):
            self._loaded = reply.held.session
            return None
        if reply.error is None:
            return SamplerError(f"{self} loaded version {weights.version}, but has {reply.held}")
        if reply.error.kind != SamplerError.__name__:
            raise reply.error.to_exception(str(self))
        return SamplerError(f"{self}: {reply.error.message}")

    async def _send_files(self, files: Mapping[str, WeightFile], version: int, deadline: float) -> bool:
        """Send files one after another; whether all arrived. Else the server may be another process by now."""
        log.info("%s cannot read the weights of version %d from disk: sending %d files", self, version, len(files))
        for path, file in files.items():
            where = f"/weights/{quote(file.name)}?size={file.size}&mtime_ns={file.mtime_ns}"
            try:
                await self._exchange("PUT", where, Path(path), deadline)
            except FileNotFoundError as error:
                raise SamplerError(f"the weights of version {version} cannot be read: {error}") from error
            except UnansweredError as error:
                log.warning("%s did not receive %s: %s", self, file.name, str(error))
                self._refuse_late(error, deadline)
                await asyncio.sleep(PAUSES_S[-1])
                return False
        return True

    async def _post(self, path: str, body: bytes, deadline: float) -> Reply:
        async def ask() -> Reply:
            return Reply.parse(await self._exchange("POST", path, body, deadline))

        reply = await self._retry(ask, deadline)
        if self._session and reply.held.session != self._session:
            self._metrics.add("restarts")
            log.warning("%s is a new process", self)
        self._session = reply.held.session
        self._metrics.record_device(self._name, reply.header.get("device", {}))
        return reply

    async def _retry(self, ask: Callable[[], Coroutine[Any, Any, T]], deadline: float) -> T:
        tries, begin = 0, time.monotonic()
        level = logging.WARNING if self._session else logging.INFO  # at first it may still be starting
        while True:
            try:
                found = await ask()
            except UnansweredError as error:
                self._refuse_late(error, deadline)
                if not tries:
                    log.log(level, "%s does not respond; waiting: %s", self, str(error))  # without its frames
            else:
                if tries:
                    log.log(level, "%s responds after %.1f s", self, time.monotonic() - begin)
                return found
            await asyncio.sleep(max(min(PAUSES_S[min(tries, len(PAUSES_S) - 1)], deadline - time.monotonic()), 0.0))
            tries += 1

    def _refuse_late(self, error: UnansweredError, deadline: float) -> None:
        if time.monotonic() >= deadline:
            remedy = f"see {self._log_file}, or raise sampler.timeout_s"
            raise SamplerError(f"{self} did not respond in time: {error}; {remedy}") from error

    async def _exchange(self, method: str, path: str, body: bytes | Path | None, deadline: float) -> bytes:
        """One request. Raises UnansweredError, and FileNotFoundError for a body that is gone."""
        try:
            self._url = Endpoint.read(self._path).url
        except FileNotFoundError as error:
            raise UnansweredError("it does not listen yet") from error
        except (OSError, ValueError) as error:
            raise UnansweredError(str(error)) from error
        left = max(deadline - time.monotonic(), 0.001)
        if isinstance(body, Path) and not body.exists():
            raise FileNotFoundError(f"{body} is gone")
        try:
            status, content = await request(
                method,
                self._url + path,
                timeout_s=left,
                largest_bytes=MAX_BODY_BYTES,
                body=body,
                headers=self._headers,
                silence_s=min(self._silence_s, left),
            )
        except TimeoutError as error:
            late = time.monotonic() >= deadline
            raise UnansweredError("it is still working" if late else "no heartbeat") from error
        except (OSError, ClientError) as error:
            raise UnansweredError(failure_reason(error)) from error
        if status != 200:
            raise UnansweredError(f"status {status}: {shorten(content.decode(errors='replace').strip(), 200)}")
        return content


def _unreadable(body: bytes) -> UnansweredError:
    return UnansweredError(f"its response cannot be read: {shorten(repr(body), 80)}")


def _read_scores(rows: Sequence[Sequence[int]], reply: Reply) -> Scores:
    return decode_scores(reply.header, reply.arrays, rows)
