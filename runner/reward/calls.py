"""A call of a function of the user's, wherever its pool of processes is; and as it is sent where that is elsewhere.

POST /call ─▶ {"pool", "arguments", "size", "seed"}    ◀─ {"values": [1.0, null], "faults": [[kind, message, samples]]}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any, Protocol

from runner.reward.faults import Fault, Scored

VERB = "/call"
Json = dict[str, Any]


class Calls(Protocol):
    """What has a function of the user's run, `workers` calls at a time; see `pool.Pool`."""

    workers: int

    def start(self) -> None: ...

    def call(self, arguments: Mapping[str, Any], size: int, seed: int) -> Scored: ...

    def close(self) -> None: ...


def asked(pool: int, arguments: Mapping[str, Any], size: int, seed: int) -> Json:
    """A call of pool number `pool`."""
    return {"pool": pool, "arguments": arguments, "size": size, "seed": seed}


def answered(pools: Sequence[Calls], body: Json) -> Json:
    """What the pool that is meant makes of a call."""
    scored = pools[body["pool"]].call(body["arguments"], body["size"], body["seed"])
    return {"values": scored.values, "faults": [astuple(fault) for fault in scored.faults]}


def scored_of(answer: Json) -> Scored:
    """The scores again."""
    return Scored(answer["values"], tuple(Fault(*fault) for fault in answer["faults"]))
