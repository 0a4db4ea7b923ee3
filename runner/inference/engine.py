"""What an engine takes and gives: requests of token ids, and one event for every new token.

    submit(request) ─▶ waiting ─step()─▶ running ─step()─▶ TokenEvent … TokenEvent(finish_reason) ─▶ gone
                                                    cancel(id): gone, without another event

A request joins and leaves between two steps. One thread drives an engine: no method may be called from a second one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length"]
LogprobsMode = Literal["raw", "processed"]  # of `TokenEvent.top_logprobs`: of raw_logprob's distribution, or logprob's


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled.

    temperature: 0 = always the likeliest token; top_k: None = all; stop: strings that end the answer, which stay in its
    ids; stop_token_ids: beside the model's own end tokens; ignore_eos: the model's own end nothing; seed: of the
    request's own random stream, 0 ≤ seed < 2¹²⁸; logprobs: how many of the likeliest tokens each event names;
    logprobs_mode: of the model (raw), or of the distribution that is sampled from (processed); adapter: None = the
    base, or the only adapter
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    max_new_tokens: int = 16
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0
    logprobs: int = 0
    logprobs_mode: LogprobsMode = "raw"
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One answer to be generated. id: the caller's, unique among the requests that are not finished."""

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """A new token of a request; an end token that was sampled is one, too.

    logprob: of the distribution sampled from (tempered, truncated; at temperature 0 the same as raw_logprob);
    raw_logprob: at temperature 1, untruncated; top_logprobs: (token id, log-probability), likeliest first, as
    `SamplingParams.logprobs_mode` says;
    weight_version: of the weights that computed it; finish_reason: None while the answer continues
    """

    request_id: str
    token_id: int
    logprob: float
    raw_logprob: float
    top_logprobs: tuple[tuple[int, float], ...]
    weight_version: int
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A given token's log-probability after the tokens before it, and the likeliest tokens in its place.

    At temperature 1, untruncated.
    """

    logprob: float
    top_logprobs: tuple[tuple[int, float], ...]
