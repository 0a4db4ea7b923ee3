"""The process that runs a user's reward function: one call for each group.

It is started and guarded as `runner.user_code.worker` says.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

from runner.core.untrusted_text import shorten
from runner.user_code.worker import (
    Serve,
    answer,
    describe_error,
    dump_stack_before_timeout,
    error_location,
    main,
    seed_generators,
    select_arguments,
)


def prepare(function: Callable[..., Any], path: str) -> tuple[dict[str, Any], Serve]:
    """What answers questions to the function."""
    return {}, partial(_serve, function, path)


def _serve(function: Callable[..., Any], path: str, channel: socket.socket, stack: int) -> None:
    me = os.getpid()
    for line in channel.makefile("rb"):
        question = json.loads(line)
        with dump_stack_before_timeout(stack, question["timeout_s"]):
            reply = call_function(function, question, path)
        if os.getpid() != me:
            os._exit(0)  # the function forked and its child came back: only one of the two may answer
        answer(channel, reply)


def call_function(function: Callable[..., Any], question: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Call the function for one group: {"values": [...], "faults": [[kind, message, samples], ...]}."""
    size, logged = int(question["size"]), list[str]()
    given = dict(question["arguments"])
    if "trainer_state" in given:  # a user's function, in TRL's signature
        given["trainer_state"] = TrainerState(**given["trainer_state"])
        given["log_extra"] = lambda column, values: logged.append(f"log_extra {column}: {list(values)!r}")
        given["log_metric"] = lambda name, value: logged.append(f"log_metric {name}: {value}")
    if "environments" in given:
        given["environments"] = [SimpleNamespace(**state) for state in given["environments"]]
    seed_generators(question["seed"])
    try:
        returned = function(**select_arguments(function, given))
        if inspect.isawaitable(returned):
            returned = asyncio.run(_await_result(returned))
        return validate_scores(returned, size) | {"logged": logged}
    except Exception as error:  # foreign code may raise anything; it is reported, and this group has no scores
        kind = f"{type(error).__name__} at {error_location(error, path)}"
        reply = {"values": [None] * size, "faults": [[kind, describe_error(error, path), size]]}
        return reply | {"trace": traceback.format_exc()}


class TrainerState:
    """TRL's argument `trainer_state`, with what is known here."""

    def __init__(self, global_step: int, max_steps: int) -> None:
        self.global_step, self.max_steps = global_step, max_steps

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"trainer_state.{name} is not known to a run; it has: {', '.join(vars(self))}")


async def _await_result(returned: Any) -> Any:
    return await returned


def validate_scores(returned: Any, size: int) -> dict[str, Any]:
    """What was returned as scores: a finite float or None for each of `size` samples, and what was wrong."""
    if not isinstance(returned, Iterable) or isinstance(returned, str | bytes | Mapping | set | frozenset):
        return _invalid_scores(f"expected a list of {size} scores, got {_short_repr(returned)}", size)
    values = list(returned)
    if len(values) != size:
        return _invalid_scores(
            f"expected {size} scores, one for each completion, got {len(values)}: {_short_repr(values)}", size
        )
    scores, faults = [], []
    for i, value in enumerate(values):
        score, fault = _as_score(value)
        scores.append(score)
        if fault:
            faults.append(
                [fault, f"score {i + 1} of {size} is {_short_repr(value)}; expected a finite number or None", 1]
            )
    return {"values": scores, "faults": faults}


def _invalid_scores(message: str, size: int) -> dict[str, Any]:
    return {"values": [None] * size, "faults": [["wrong number of scores", message, size]]}


def _as_score(value: Any) -> tuple[float | None, str | None]:
    """(score, kind of fault); None is no fault: the function has no score for the sample."""
    if value is None:
        return None, None
    if isinstance(value, str | bytes) or not hasattr(type(value), "__float__"):
        return None, "not a number"
    try:
        score = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # an array of several numbers, an int of 400 digits
        return None, "not a number"
    return (score, None) if math.isfinite(score) else (None, "not finite")


def _short_repr(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as error:  # the repr of a foreign object may fail; its type is all that is known then
        text = f"an object whose repr raises {type(error).__name__}"
    return f"{shorten(text, 100)} ({type(value).__name__})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], prepare))
