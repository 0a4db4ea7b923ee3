"""What a server's log-probabilities are of: the distribution that was drawn from, or the model's own.

vLLM reports the model's own unless it is told otherwise, whatever was sampled. Two requests tell: the likeliest id
alone is drawn from, whose probability then is 1, at two temperatures.

    log-probability at temperature 1, at 2        they are of
    0, 0                                          what was drawn from      "processed"
    a, a                                          the model itself         "raw"
    a, b                                          the tempered model, before ids are cut   "tempered"
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from runner.core.errors import EnvironmentProblem
from runner.sampler.draw import Rule
from runner.sampler.remote.check import InvalidError
from runner.sampler.server.client import GarbledError, StatusError
from runner.sampler.server.server import Server
from runner.sampler.server.wire import Asking, drawn

Mode = Literal["processed", "raw", "tempered"]
HOT = 2.0  # newer versions refuse more
PROMPTS, TOKENS, ANSWER = 4, 8, 2
EQUAL = 0.02  # nats: above the noise of bfloat16, far below what a factor of 2 does
FIX = "start it with --logprobs-mode processed_logprobs"


def mode_of(server: Server, vocabulary: int) -> Mode:
    """What this server reports. Raises EnvironmentProblem if it gives no token ids or log-probabilities at all."""
    draws = np.random.Generator(np.random.Philox(key=0))
    prompts = draws.integers(0, vocabulary, (PROMPTS, TOKENS)).tolist()
    cold, hot = ([value for prompt in prompts for value in _asked(server, prompt, t)] for t in (1.0, HOT))
    if _mean(cold) < EQUAL and _mean(hot) < EQUAL:
        return "processed"
    return "raw" if _mean([a - b for a, b in zip(cold, hot, strict=True)]) < EQUAL else "tempered"


def fits(mode: Mode, rule: Rule) -> bool:
    """Whether these are the log-probabilities of what the rule draws from."""
    cuts = rule.top_k is not None or rule.top_p < 1 or rule.min_p > 0
    return mode == "processed" or rule.raw or (mode == "tempered" and not cuts)


def _asked(server: Server, prompt: Sequence[int], temperature: float) -> list[float]:
    """The log-probabilities of the likeliest answer."""
    asking = Asking(Rule(temperature, top_k=1), frozenset(), ())
    try:
        answer = server.client.post("/v1/completions", asking.body(server.model, prompt, ANSWER, 0), server.until())
        found = drawn(answer, prompt)
        if len(found.ids) != ANSWER or len(found.logprobs) != ANSWER:
            raise InvalidError(f"{ANSWER} tokens were asked for, and {len(found.ids)} came")
        return [float(value) for value in found.logprobs]
    except (InvalidError, StatusError, GarbledError, TypeError) as error:
        raise EnvironmentProblem(f"nothing can be sampled from {server}: {error}") from error


def _mean(values: Sequence[float]) -> float:
    return float(np.abs(values).mean())
