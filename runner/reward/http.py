"""A reward service: each group is one POST of JSON, and the answer is its scores.

request:   {"prompts": [...], "completions": [...], "completion_ids": [[...]], "columns": {"answer": [...], ...}}
response:  {"scores": [1.0, null, ...]}, or the list alone
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from aiohttp import ClientError

from runner.core.errors import EnvironmentProblem
from runner.core.http_client import AnswerTooLargeError, failure_reason, request, run_coroutine
from runner.core.untrusted_text import parse_json, shorten
from runner.interfaces.rewards import (
    RESERVED_ARGUMENTS,
    Group,
    GroupScorer,
    GroupScores,
    ScoringFailure,
    ScoringFailures,
    encode_json,
    reward_arguments,
    unscored_group,
)
from runner.reward.config import HttpConfig
from runner.reward.worker import validate_scores

LARGEST_BYTES = 64 << 20


class ServiceFailure(Exception):
    """A service gave no answer; `again`: a further try may help."""

    def __init__(self, kind: str, message: str, again: bool) -> None:
        super().__init__(message)
        self.kind, self.retryable = kind, again


def _request_scores(config: HttpConfig, body: bytes) -> Any:
    """The service's answer, decoded. Raises ServiceFailure when the last try failed."""
    for tried in range(config.retries):
        try:
            return post_json(config.url, body, config.timeout_s)
        except ServiceFailure as failure:
            if not failure.retryable:
                raise
        time.sleep(config.backoff_s * 2**tried)
    return post_json(config.url, body, config.timeout_s)


def post_json(url: str, body: bytes, timeout_s: float) -> Any:
    """The decoded answer. Raises ServiceFailure.

    One deadline covers name lookup, connection, headers and body.
    """
    try:
        status, content = run_coroutine(
            request("POST", url, timeout_s=timeout_s, largest_bytes=LARGEST_BYTES, body=body)
        )
    except AnswerTooLargeError as error:
        raise ServiceFailure("response too large", f"{url}: {error}", again=False) from error
    except (OSError, ClientError) as error:  # TimeoutError is an OSError
        late = f"no complete response within {timeout_s:g} s"
        reason = late if isinstance(error, TimeoutError) else failure_reason(error)
        raise ServiceFailure(f"no response ({type(error).__name__})", f"{url}: {reason}", again=True) from error
    if status != 200:
        again = status == 429 or status >= 500
        start = shorten(content.decode(errors="replace"), 200)
        raise ServiceFailure(f"status {status}", f"{url}: status {status}: {start!r}", again)
    try:
        return parse_json(content)
    except ValueError as error:
        raise ServiceFailure("not JSON", f"{url}: the response is not JSON: {error}", again=False) from error


def build(config: HttpConfig, **_: Any) -> GroupScorer:
    """The reward; the first request is sent when there is something to score."""

    def score_group(group: Group) -> GroupScores:
        try:
            answer = _request_scores(config, encode_json(_body(group)))
        except ServiceFailure as failure:
            return unscored_group(len(group), failure.kind, str(failure))
        found = validate_scores(answer.get("scores") if isinstance(answer, Mapping) else answer, len(group))
        return GroupScores(found["values"], tuple(ScoringFailure(*fault) for fault in found["faults"]))

    remedy = "check the service, or set reward.url, reward.timeout_s, reward.retries"
    return GroupScorer(
        score_group, ScoringFailures(config.url, config.max_failures, remedy, EnvironmentProblem), config.workers
    )


def _body(group: Group) -> dict[str, Any]:
    given = reward_arguments(group)
    return {name: given.pop(name) for name in RESERVED_ARGUMENTS} | {"columns": given}
