"""Token sampling from logits, stop criteria of answers, and checks of sampling parameters.

One id per row is sampled from logits (temperature, truncation, one pair of uniform numbers per sample). An answer is
over at an end token, a stop string in its text, or its last permitted token.

    logits [B, V] ──÷ temperature──▶ top-k ─▶ nucleus ─▶ min-p ──softmax──▶ p ──inverse CDF at u──▶ ids [B]

Every row is computed by itself and reads its own uniforms, so a sample does not depend on other rows. Running sums
are of integers: exact, monotone, and the same in every order of adding (parallel sums of floats are none of these, and
refused by torch where kernels must be deterministic). The inverse is taken in two steps, first a block of ids and then
an id of the block, which is faster and finer than one. Legend: B rows, V vocabulary, K candidates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from runner.core.errors import DataError, Problem, SpecError
from runner.interfaces import Request
from runner.sampler.base import SamplingConfig

BLOCK = 512  # ids of a block
UNIFORM_BITS = 24
MASS_BITS = 38  # of a probability in a running sum; its product with a uniform number fits into 63 bits
UNIFORMS_AT_ONCE = 64  # random words that a stream makes ahead
TOPK_START = 256  # candidates that a nucleus is first sought among


@dataclass(frozen=True, slots=True)
class SamplingRule:
    """The sampled distribution: softmax(logits / temperature), truncated in this order.

    It is renormalized each time.

    top_k: the k likeliest (None = all); top_p: the fewest whose mass reaches p (Holtzman et al. 2020, §3.1, "The
    Curious Case of Neural Text Degeneration"); min_p: those at least min_p times as likely as the likeliest (Nguyen et
    al. 2025, §3, "Turning Up the Heat: Min-p Sampling"). At least one id always stays.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def truncates(self) -> bool:
        """Whether the distribution is truncated."""
        return self.top_k is not None or self.top_p < 1 or self.min_p > 0


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """ids int64 [B] and their logprobs, float32 or better [B].

    The logprobs are under the rule and, if requested, at its temperature before truncation.
    """

    ids: Tensor
    logprobs: Tensor
    raw_logprobs: Tensor | None


def uniform_stream(seed: int) -> Iterator[tuple[int, int]]:
    """An endless stream of pairs of integers below 2²⁴, a function of `seed` (0 ≤ seed < 2¹²⁸) alone.

    Philox, a counter-based generator (Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3").
    """
    bits = np.random.Philox(key=seed)
    high, low = np.uint64(64 - UNIFORM_BITS), np.uint64(2**UNIFORM_BITS - 1)
    while True:
        words = bits.random_raw(UNIFORMS_AT_ONCE)
        yield from zip((words >> high).tolist(), (words & low).tolist(), strict=True)


def sample_tokens(logits: Tensor, u: Tensor, rule: SamplingRule, *, raw: bool = False) -> SampledTokens:
    """One id per row of `logits` [B, V], at the point that the uniforms u, int64 [B, 2], name.

    raw: with raw_logprobs, which a rule that truncates pays for with a logsumexp of [B, V].
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    scaled = logits if rule.temperature == 1 else logits / rule.temperature
    values, ids = truncate_logits(scaled, rule)
    p = values.softmax(-1)
    place = inverse_cdf(p, u)
    drawn = place if ids is None else ids.gather(1, place)
    logprobs = p.gather(1, place).log()
    if not raw:
        return SampledTokens(drawn[:, 0], logprobs[:, 0], None)
    untruncated = scaled.gather(1, drawn) - scaled.logsumexp(-1, keepdim=True) if rule.truncates else logprobs
    return SampledTokens(drawn[:, 0], logprobs[:, 0], untruncated[:, 0])


def truncate_logits(scaled: Tensor, rule: SamplingRule) -> tuple[Tensor, Tensor | None]:
    """Logits at the temperature [B, K], -inf for what is cut, and their ids [B, K]; None = all ids."""
    values, ids = scaled, None
    if rule.top_k is not None:
        values, ids = scaled.topk(rule.top_k)
    if rule.top_p < 1:
        mass = values.logsumexp(-1, keepdim=True)
        if ids is None:
            values, ids = _likeliest(scaled, mass, rule.top_p)
        p = _integers((values - mass).exp())
        values = values.masked_fill(p.cumsum(-1) - p >= max(round(rule.top_p * 2**MASS_BITS), 1), -math.inf)
    if rule.min_p > 0:
        values = values.masked_fill(values < values.amax(-1, keepdim=True) + math.log(rule.min_p), -math.inf)
    return values, ids


def _likeliest(scaled: Tensor, mass: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The likeliest ids in order, enough to hold every row's nucleus: sorting all would be slow."""
    count, vocabulary = TOPK_START, scaled.shape[1]
    while count < vocabulary:
        values, ids = scaled.topk(count)
        if bool(((values - mass).exp().sum(-1) > top_p).all()):
            return values, ids
        count *= 8
    values, ids = scaled.sort(descending=True)
    return values, ids


def _integers(p: Tensor) -> Tensor:
    return (p * 2.0**MASS_BITS).long()


def inverse_cdf(p: Tensor, u: Tensor) -> Tensor:
    """Where the running sum of p [B, K], whose rows add up to 1, passes the point u [B, 2]; int64 [B, 1].

    A place without mass is never taken; one below 2⁻³⁸ in K ≤ 512, or in its block of 512, neither.
    """
    if p.shape[1] <= BLOCK:
        return _cdf_index(p, u[:, 1:])
    blocks = F.pad(p, (0, -p.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    sums = blocks.sum(-1)
    block = _cdf_index(sums, u[:, :1])
    inside = blocks.take_along_dim(block[..., None], 1)[:, 0] / sums.take_along_dim(block, 1)
    return block * BLOCK + _cdf_index(inside, u[:, 1:])


def _cdf_index(p: Tensor, u: Tensor) -> Tensor:
    running = _integers(p).cumsum(-1)
    point = running[:, -1:] * u >> UNIFORM_BITS  # always below the last sum
    place = torch.searchsorted(running, point, right=True)
    return place.clamp_(max=p.shape[1] - 1)  # where p is not a number


CONTEXT = 8  # ids before a possible match, because a decoder may treat the first ones of a text differently


class StopCriteria:
    """Ids and strings that end an answer. Strings are sought in the new text, special tokens included."""

    def __init__(self, tokenizer: Any, ids: frozenset[int], strings: Sequence[str]) -> None:
        self._tokenizer, self._ids, self._strings = tokenizer, ids, strings
        # no id is shorter than a byte, so a match that ends in the last id lies within this many
        self._tail = max((len(string.encode()) for string in strings), default=0) + CONTEXT

    def finish_reason(self, ids: Sequence[int], limit: int) -> str | None:
        """Why an answer ends with its last id ("stop" or "length"), or None. To be called after every id."""
        return self._reason(ids[-self._tail :], len(ids), limit)

    def first_stop(self, ids: Sequence[int], limit: int) -> tuple[int, str] | None:
        """How many of the ids that another drew the answer has, and why it ends there; None if it continues."""
        for size in range(1, len(ids) + 1):
            if reason := self._reason(ids[max(size - self._tail, 0) : size], size, limit):
                return size, reason
        return None

    def _reason(self, tail: Sequence[int], size: int, limit: int) -> str | None:
        """The same of an answer of `size` ids that ends with these."""
        if tail[-1] in self._ids or self._in_text(tail):
            return "stop"
        return "length" if size >= limit else None

    def _in_text(self, tail: Sequence[int]) -> bool:
        if not self._strings:
            return False
        text = self._tokenizer.decode([*tail], skip_special_tokens=False)
        return any(string in text for string in self._strings)


def check_token_ids(config: SamplingConfig, vocabulary: int) -> None:
    """Raise SpecError for ids and counts of ids outside the vocabulary."""
    found = [
        Problem("sampler.stop_token_ids", f"the model has the ids 0 to {vocabulary - 1}, but not {token}")
        for token in config.stop_token_ids
        if token >= vocabulary
    ]
    if config.top_k is not None and config.top_k > vocabulary:
        found.append(Problem("sampler.top_k", f"the model has only {vocabulary} ids, not {config.top_k}; leave it out"))
    if found:
        raise SpecError(found)


def answer_limit(request: Request, most: int, longest: tuple[int, str] | None) -> int:
    """The most tokens of this answer.

    most: tokens of an answer; longest: tokens of prompt and answer together, and why, None = no limit.

    Raises ValueError where no token is requested, DataError where the prompt leaves no room.
    """
    limit, prompt = min(request.max_new_tokens, most), len(request.prompt)
    if limit < 1:
        raise ValueError(f"max_new_tokens={request.max_new_tokens}; a completion needs at least one token")
    if longest is not None and prompt + limit > longest[0]:
        raise DataError(
            f"a prompt of {prompt} tokens and {limit} new ones exceed {longest[0]}: {longest[1]}; lower "
            "sampler.max_new_tokens or data.max_length"
        )
    return limit
