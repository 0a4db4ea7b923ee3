"""Whether answers can be those that were asked for: a sampler that is ill is noticed, never learnt from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from runner.interfaces import Request, Rollout

ROUNDING = 1e-3  # by which a log-probability may lie above 0


class InvalidError(Exception):
    """What came back is no answer to what was asked; says which one and why."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What an answer may have: ids below `vocabulary`, and so many of them."""

    vocabulary: int
    max_new_tokens: int


def checked(found: Any, requests: Sequence[Request], version: int, limits: Limits) -> list[Rollout]:
    """Rollouts as they were sent, in the order of the requests. Raises InvalidError."""
    if not isinstance(found, list) or len(found) != len(requests):
        size = len(found) if isinstance(found, list) else f"a {type(found).__name__}"
        raise InvalidError(f"{len(requests)} answers were asked for, and {size} came")
    return [
        _one(one, request, version, limits, at) for at, (one, request) in enumerate(zip(found, requests, strict=True))
    ]


def scores(found: Any, rows: Sequence[Sequence[int]]) -> list[list[list[float]]]:
    """Scores as they were sent, by engine and row. Raises InvalidError."""
    if not isinstance(found, list) or not found:
        raise InvalidError("no log-probabilities came")
    return [_of_engine(engine, rows) for engine in found]


def _one(one: Any, request: Request, version: int, limits: Limits, at: int) -> Rollout:
    where, most = f"answer {at}", min(request.max_new_tokens, limits.max_new_tokens)
    if not isinstance(one, dict):
        raise InvalidError(f"{where} is a {type(one).__name__}")
    ids = one.get("ids")
    if not isinstance(ids, list) or not ids:
        raise InvalidError(f"{where} is empty")
    if len(ids) > most:
        raise InvalidError(f"{where} has {len(ids)} tokens, above {most}")
    if wrong := [token for token in ids if type(token) is not int or not 0 <= token < limits.vocabulary]:
        raise InvalidError(f"{where} has the id {wrong[0]!r}, and the vocabulary those below {limits.vocabulary}")
    if one.get("version") != version:
        raise InvalidError(f"{where} is of version {one.get('version')!r}, not {version}")
    if one.get("finish") not in ("stop", "length"):
        raise InvalidError(f"{where} ends with {one.get('finish')!r}, not with stop or length")
    logprobs = _logprobs(one.get("logprobs"), len(ids), where)
    raw = one.get("raw_logprobs") if request.raw else None  # None: an engine that cannot report them
    raw = None if raw is None else _logprobs(raw, len(ids), where)
    return Rollout(tuple(ids), logprobs, raw, version, one["finish"])


def _logprobs(found: Any, size: int, where: str) -> tuple[float, ...]:
    if not isinstance(found, list) or len(found) != size:
        amount = len(found) if isinstance(found, list) else "no"
        raise InvalidError(f"{where} has {amount} log-probabilities for {size} tokens")
    for value in found:
        if not isinstance(value, float | int) or not math.isfinite(value) or value > ROUNDING:
            raise InvalidError(f"{where} has the log-probability {value!r}")
    return tuple(map(float, found))


def _of_engine(found: Any, rows: Sequence[Sequence[int]]) -> list[list[float]]:
    if not isinstance(found, list) or len(found) != len(rows):
        raise InvalidError(f"log-probabilities of {len(rows)} rows were asked for")
    return [
        list(_logprobs(one, len(row) - 1, f"row {at}")) for at, (one, row) in enumerate(zip(found, rows, strict=True))
    ]
