"""A reward service: each group is one POST of JSON, and the answer is its scores.

request:   {"prompts": [...], "completions": [...], "completion_ids": [[...]], "columns": {"answer": [...], ...}}
response:  {"scores": [1.0, null, ...]}, or the list alone
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import ClientError

from runner.core.errors import EnvironmentProblem
from runner.core.http_client import AnswerTooLargeError, failure_reason, request, run_coroutine
from runner.core.untrusted_text import parse_json
from runner.reward.base import RESERVED_ARGUMENTS
from runner.reward.config import HttpConfig
from runner.reward.group_scorer import (
    Group,
    GroupScorer,
    GroupScores,
    ScoringFailure,
    ScoringFailures,
    encode_json,
    reward_arguments,
    unscored_group,
)
from runner.reward.worker import validate_scores

LARGEST_BYTES = 64 << 20


class _Failure(Exception):
    """The service gave no scores; `again`: a further try may help."""

    def __init__(self, kind: str, message: str, again: bool) -> None:
        super().__init__(message)
        self.kind, self.retryable = kind, again


@dataclass(frozen=True, slots=True)
class RewardEndpoint:
    """Where to send requests; timeout_s is one deadline for connection, headers and body of a request."""

    url: str
    timeout_s: float
    retries: int
    backoff_s: float

    def request_scores(self, body: bytes) -> Any:
        """The service's answer, decoded. Raises _Failure when the last try failed."""
        for tried in range(self.retries + 1):
            try:
                return self._post(body)
            except _Failure as failure:
                if not failure.retryable or tried == self.retries:
                    raise
            time.sleep(self.backoff_s * 2**tried)
        raise AssertionError("the last try returns or raises")

    def _post(self, body: bytes) -> Any:
        try:
            status, content = run_coroutine(
                request("POST", self.url, timeout_s=self.timeout_s, largest_bytes=LARGEST_BYTES, body=body)
            )
        except AnswerTooLargeError as error:
            raise _Failure("response too large", f"{self.url}: {error}", again=False) from error
        except (OSError, ClientError) as error:  # TimeoutError is an OSError
            late = f"no complete response within {self.timeout_s:g} s"
            reason = late if isinstance(error, TimeoutError) else failure_reason(error)
            raise _Failure(f"no response ({type(error).__name__})", f"{self.url}: {reason}", again=True) from error
        if status != 200:
            again = status == 429 or status >= 500
            said = content[:200].decode(errors="replace")
            raise _Failure(f"status {status}", f"{self.url}: status {status}: {said!r}", again)
        try:
            return parse_json(content)
        except ValueError as error:
            raise _Failure("not JSON", f"{self.url}: the response is not JSON: {error}", again=False) from error


def build(config: HttpConfig, **_: Any) -> GroupScorer:
    """The reward; the first request is sent when there is something to score."""
    endpoint = RewardEndpoint(config.url, config.timeout_s, config.retries, config.backoff_s)

    def ask(group: Group) -> GroupScores:
        try:
            answer = endpoint.request_scores(encode_json(_body(group)))
        except _Failure as failure:
            return unscored_group(len(group), failure.kind, str(failure))
        found = validate_scores(answer.get("scores") if isinstance(answer, Mapping) else answer, len(group))
        return GroupScores(found["values"], tuple(ScoringFailure(*fault) for fault in found["faults"]))

    remedy = "check the service, or set reward.url, reward.timeout_s, reward.retries"
    return GroupScorer(
        ask, ScoringFailures(config.url, config.max_failures, remedy, EnvironmentProblem), config.workers
    )


def _body(group: Group) -> dict[str, Any]:
    given = reward_arguments(group)
    return {name: given.pop(name) for name in RESERVED_ARGUMENTS} | {"columns": given}
