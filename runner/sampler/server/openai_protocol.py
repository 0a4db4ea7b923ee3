"""Requests to /v1/completions and the parsing of its answers: tokens in, tokens out.

Nothing is tokenized twice.

Each request sets what a server would otherwise add from its own files: end tokens (`ignore_eos` excludes those of its
files), and the penalties and truncation of a generation config. A server reports neither a version nor a digest of its
weights, so a fingerprint identifies them.

Log-probabilities are those of the distribution that was sampled from, or the model's own, which is vLLM's default. Two
requests find out which: they sample with top_k=1, so that the probability is 1, at two temperatures.

    log-probability at temperature 1, at 2        they are of
    0, 0                                          the sampled distribution   "processed"
    a, a                                          the model itself           "raw"
    a, b                                          the tempered model, before truncation   "tempered"
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from runner.core.errors import EnvironmentProblem
from runner.sampler.sampling import SamplingRule
from runner.sampler.server.openai_client import GarbledError, StatusError
from runner.sampler.server.protocol import InvalidAnswerError
from runner.weight_sync.sync_probe import mean_difference

if TYPE_CHECKING:
    from runner.sampler.server.openai_server import OpenAiServer

Json = dict[str, Any]
NO_LOGPROB = -9999.0  # vLLM's value for minus infinity, which JSON does not have
PLACEHOLDER = "token_id:"
ALL_IDS = -1  # top_k without truncation; newer versions use 0 and accept both


@dataclass(frozen=True, slots=True)
class RequestTemplate:
    """What all requests of a run have in common."""

    rule: SamplingRule
    ends: frozenset[int]
    stops: tuple[str, ...]

    def body(self, model: str, prompt: Sequence[int], limit: int, seed: int) -> Json:
        """A request for one answer of at most `limit` tokens."""
        return {
            "model": model,
            "prompt": list(prompt),
            "n": 1,
            "max_tokens": limit,
            "seed": seed,
            "temperature": self.rule.temperature,
            "top_k": ALL_IDS if self.rule.top_k is None else self.rule.top_k,
            "top_p": self.rule.top_p,
            "min_p": self.rule.min_p,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "ignore_eos": True,
            "stop_token_ids": sorted(self.ends),
            "stop": list(self.stops),
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }


def score_request(model: str, row: Sequence[int]) -> Json:
    """A request for the log-probabilities of a row; servers sample at least one token, which is not used."""
    return {
        "model": model,
        "prompt": list(row),
        "max_tokens": 1,
        "temperature": 1.0,
        "seed": 0,
        "ignore_eos": True,
        "prompt_logprobs": 0,
    }


@dataclass(frozen=True, slots=True)
class CompletionAnswer:
    """An answer as the server gave it, only its form checked. stopped_by: a stop string the server saw."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    stopped_by: str | None


def only_choice(answer: Any) -> Json:
    """The one choice of an answer. Raises InvalidAnswerError."""
    choices = answer.get("choices") if isinstance(answer, Mapping) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise InvalidAnswerError("the response does not have exactly one choice")
    return choices[0]


def parse_completion(answer: Any, prompt: Sequence[int]) -> CompletionAnswer:
    """The answer's tokens and log-probabilities.

    Raises InvalidAnswerError, also where they continue another prompt.
    """
    choice = only_choice(answer)
    read = choice.get("prompt_token_ids")
    if read is not None and list(read) != list(prompt):
        raise InvalidAnswerError(f"the server read {len(read)} prompt tokens, not the {len(prompt)} that were sent")
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, dict) or not isinstance(logprobs.get("token_logprobs"), list):
        raise InvalidAnswerError("the response has no log-probabilities (logprobs.token_logprobs)")
    reason, values = choice.get("stop_reason"), logprobs["token_logprobs"]
    try:
        found = array("q", _ids(choice, logprobs)), array("d", values)
    except (TypeError, OverflowError) as error:
        raise InvalidAnswerError(f"the response's ids or log-probabilities are not numbers: {error}") from error
    if NO_LOGPROB in values:
        raise InvalidAnswerError(f"the response has no log-probability of token {values.index(NO_LOGPROB)}")
    return CompletionAnswer(*found, stopped_by=reason if isinstance(reason, str) else None)


def _ids(choice: Json, logprobs: Json) -> list[Any]:
    """The ids of an answer: vLLM's since 0.10.2, or those in the placeholders of tokens, which are older."""
    if isinstance(ids := choice.get("token_ids"), list):
        return ids
    tokens = logprobs.get("tokens")
    if not isinstance(tokens, list) or not all(str(token).startswith(PLACEHOLDER) for token in tokens):
        raise InvalidAnswerError("the response has no token ids (token_ids), and text is not tokenized again")
    return [int(token.removeprefix(PLACEHOLDER)) for token in tokens]


def parse_scores(answer: Any, row: Sequence[int]) -> list[float]:
    """The log-probabilities of all ids of the row but the first. Raises InvalidAnswerError."""
    found = only_choice(answer).get("prompt_logprobs")
    if not isinstance(found, list) or len(found) != len(row):
        raise InvalidAnswerError("the response has no log-probabilities of the prompt (prompt_logprobs)")
    try:
        return [float(place[str(token)]["logprob"]) for token, place in zip(row[1:], found[1:], strict=True)]
    except (KeyError, TypeError) as error:
        raise InvalidAnswerError(f"prompt_logprobs does not belong to the prompt: {error!r}") from error


DRIFT = 0.1  # nats, mean over the fixed row: what rounding to bfloat16 adds where another kernel computes it


@dataclass(frozen=True, slots=True)
class ServerFingerprint:
    """Identifies one state of a server.

    started: when its process began, "" where it does not report that; scores: of a fixed row, None without any
    """

    started: str
    scores: list[float] | None

    def is_other(self, now: ServerFingerprint) -> bool:
        """Whether the server or its weights changed, or may have: it reports less, or more, than before."""
        if self.started != now.started:
            return True
        if self.scores is None or now.scores is None:
            return self.scores is not now.scores
        return mean_difference([now.scores], [self.scores]) > DRIFT


def read_fingerprint(server: OpenAiServer, row: Sequence[int], model: str) -> ServerFingerprint:
    """The server's fingerprint now."""
    started = server.process_start()
    try:
        return ServerFingerprint(started, server.score(row, model))
    except (InvalidAnswerError, StatusError, GarbledError):
        return ServerFingerprint(started, None)


LogprobsMode = Literal["processed", "raw", "tempered"]
HOT = 2.0  # newer versions refuse more
PROMPTS, TOKENS, ANSWER = 4, 8, 2
EQUAL = 0.02  # nats: above the noise of bfloat16, far below what a factor of 2 does
FIX = "start it with --logprobs-mode processed_logprobs"


def detect_logprobs_mode(server: OpenAiServer, vocabulary: int) -> LogprobsMode:
    """What this server's log-probabilities are of.

    Raises EnvironmentProblem if it gives no token ids or log-probabilities at all.
    """
    draws = np.random.Generator(np.random.Philox(key=0))
    prompts = draws.integers(0, vocabulary, (PROMPTS, TOKENS)).tolist()
    cold, hot = ([value for prompt in prompts for value in _likeliest_logprobs(server, prompt, t)] for t in (1.0, HOT))
    if _mean(cold) < EQUAL and _mean(hot) < EQUAL:
        return "processed"
    return "raw" if _mean([a - b for a, b in zip(cold, hot, strict=True)]) < EQUAL else "tempered"


def has_raw_logprobs(mode: LogprobsMode, rule: SamplingRule) -> bool:
    """Whether these are the log-probabilities at the rule's temperature and before its truncation."""
    return {"processed": not rule.truncates, "tempered": True, "raw": rule.temperature == 1}[mode]


def _likeliest_logprobs(server: OpenAiServer, prompt: Sequence[int], temperature: float) -> list[float]:
    """The log-probabilities of the likeliest answer."""
    template = RequestTemplate(SamplingRule(temperature, top_k=1), frozenset(), ())
    try:
        answer = server.client.post("/v1/completions", template.body(server.model, prompt, ANSWER, 0), server.until())
        found = parse_completion(answer, prompt)
        if len(found.ids) != ANSWER or len(found.logprobs) != ANSWER:
            raise InvalidAnswerError(f"{ANSWER} tokens were requested, but {len(found.ids)} arrived")
        return [float(value) for value in found.logprobs]
    except (InvalidAnswerError, StatusError, GarbledError, TypeError) as error:
        raise EnvironmentProblem(f"cannot sample from {server}: {error}") from error


def _mean(values: Sequence[float]) -> float:
    return float(np.abs(values).mean())
