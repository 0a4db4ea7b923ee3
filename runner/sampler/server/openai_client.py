"""JSON over HTTP to an external server: retries while it is busy or down, up to a deadline."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
import time
from collections.abc import Mapping
from typing import Any

from aiohttp import ClientConnectorError, ClientError

from runner.core.errors import EnvironmentProblem, SamplerError
from runner.core.http_client import CancellableRunner, failure_reason, request
from runner.core.untrusted_text import parse_json

LARGEST_BYTES = 256 << 20
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
MESSAGE_CHARS = 300  # of a server's message
WARN_S = 60.0  # between two lines on a server that does not answer
MARKUP = re.compile(r"(?s)<(style|script)\b.*?</\1>|<[^>]*>")  # a page, as web servers give it with an error
log = logging.getLogger("runner")


class StatusError(Exception):
    """The server answered with another status than 200."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"status {status}: {message}")
        self.status = status

    @property
    def is_temporary(self) -> bool:
        """Whether a later request may succeed."""
        return self.status == 429 or self.status >= 500


class GarbledError(Exception):
    """The server's answer is no JSON."""


class OpenAiClient:
    """Client of one server, for any number of threads; each request has its own connection.

    url: with or without a closing /v1; key: sent with each request; retries: further tries, each after a wait twice as
    long as the one before; `retried` counts those that were made
    """

    def __init__(self, url: str, key: str | None, retries: int) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._keyed, self.retries, self.retried = key is not None, retries, 0
        self._runner, self._lock, self._closed = CancellableRunner(), threading.Lock(), threading.Event()
        self._warned_at = float("-inf")

    def get(self, path: str, until: float) -> Any:
        """The answer to a request without a body; see `post`."""
        return _decode_json(self._retry("GET", path, None, until, again=True))

    def text(self, path: str, until: float) -> str:
        """The same where it is text."""
        return self._retry("GET", path, None, until, again=True).decode(errors="replace")

    def post(self, path: str, body: Mapping[str, Any], until: float, *, again: bool = True) -> Any:
        """The answer, decoded; None for an empty one.

        until: the deadline, as of time.monotonic(); again: it may be sent twice, and is, after a status of 500 and
        above; else it is sent again only where no connection was made. Raises StatusError for a status that remains,
        GarbledError, SamplerError if there is no answer, EnvironmentProblem if the key is wrong.
        """
        content = json.dumps(body, allow_nan=False).encode()
        return _decode_json(self._retry("POST", path, content, until, again=again))

    def close(self) -> None:
        """Cancel running requests; each raises SamplerError at once."""
        self._closed.set()
        self._runner.cancel()

    def _retry(self, method: str, path: str, content: bytes | None, until: float, *, again: bool) -> bytes:
        tried = 0
        while True:
            failure: BaseException
            try:
                return self._once(method, path, content, until)
            except StatusError as error:
                if error.status in (401, 403):
                    raise self._locked_out(error) from None
                if not error.is_temporary or not again or tried >= self.retries:
                    raise
                failure = error
            except (OSError, ClientError, asyncio.CancelledError) as error:
                failure = error
            unsent = isinstance(failure, ClientConnectorError)
            self._wait(failure, tried, self.retries if again or unsent else 0, until)
            tried += 1

    def _wait(self, failure: BaseException, tried: int, retries: int, until: float) -> None:
        late = "no complete response within sampler.timeout_s"
        reason = late if isinstance(failure, TimeoutError) else failure_reason(failure)
        if self._closed.is_set():
            raise SamplerError(f"{self.url}: the sampler was closed while it waited for a response") from failure
        pause = min(FIRST_WAIT_S * 2**tried, LONGEST_WAIT_S)
        if tried >= retries or time.monotonic() + pause >= until:
            text = f"{self.url} does not respond after {tried + 1} request{'s' if tried else ''}: {reason}"
            raise SamplerError(f"{text}; check the server, or raise sampler.retries or sampler.timeout_s") from failure
        with self._lock:
            self.retried += 1
            warns = time.monotonic() - self._warned_at > WARN_S
            self._warned_at = time.monotonic() if warns else self._warned_at
        if warns:
            more = f"retrying at most {retries - tried} times"
            log.warning("%s does not respond (%s), %s", self.url, reason, more)
        self._closed.wait(pause)

    def _locked_out(self, error: StatusError) -> EnvironmentProblem:
        instead = "its key is wrong" if self._keyed else "it needs a key; type sampler.api_key_env=NAME"
        return EnvironmentProblem(f"{self.url} refuses the request ({error}): {instead}")

    def _once(self, method: str, path: str, content: bytes | None, until: float) -> bytes:
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        options: dict[str, Any] = {"largest_bytes": LARGEST_BYTES, "body": content, "headers": self._headers}
        sent = request(method, self.url + path, timeout_s=left, **options)
        status, answer = self._runner.run(sent)
        if status != 200:
            raise StatusError(status, _error_message(answer))
        return answer


def _decode_json(content: bytes) -> Any:
    if not content:
        return None
    try:
        return parse_json(content)
    except ValueError as error:
        raise GarbledError(f"the response is not JSON: {error}") from error


def _error_message(content: bytes) -> str:
    """The message of a failed request, which comes in several forms."""
    text = content.decode(errors="replace")
    try:
        found = parse_json(text)
    except ValueError:
        found = " ".join(MARKUP.sub(" ", text).split())
    while isinstance(found, dict) and (inner := found.get("error") or found.get("message") or found.get("detail")):
        found = inner
    said = str(found)
    return said if len(said) <= MESSAGE_CHARS else f"{said[:MESSAGE_CHARS]} …"
