"""The largest micro-batch of a job that fits a card, by the estimate of its memory."""

from __future__ import annotations

from bisect import bisect_left
from functools import cache

from runner.device.cards import GIB, Card
from runner.spec.job import JobSpec
from runner.tools.plan.estimate import Estimate, estimate
from runner.tools.plan.measure import longest_unit_tokens
from runner.tools.plan.model import architecture

LARGEST = 2**17  # tokens: a larger micro-batch is not faster


def largest_micro_batch(spec: JobSpec, card: Card) -> tuple[int, str]:
    """Tokens, and why: a power of two that fits, or the longest item, if that is more.

    Where that does not fit, it is the default: a longer item is a micro-batch of its own in any case.
    """

    @cache
    def plan(size: int) -> Estimate:
        return estimate(with_micro_batch(spec, size), card)

    longest = longest_unit_tokens(spec, architecture(spec.model)[0])
    enough = min(plan(longest).work.tokens, LARGEST)  # a step has no more, or it would not be faster
    sizes = [longest, *(2**k for k in range(longest.bit_length(), (enough - 1).bit_length() + 1))]
    fitting = bisect_left(sizes, True, key=lambda size: not plan(size).fits(card))
    if not fitting:
        tokens = min(longest, spec.algorithm.micro_batch_budget)
        return tokens, f"by the estimate of run plan the longest item, {longest} tokens, may not fit the {card.name}"
    tokens = sizes[fitting - 1]
    most, memory = (f"{size / GIB:.1f}" for size in (plan(tokens).fullest_band(card).high, card.memory))
    limit = "" if fitting < len(sizes) else f"; more than {enough} would not be faster"
    return tokens, f"at most {most} of {memory} GiB of the {card.name}, by the estimate of run plan{limit}"


def with_micro_batch(spec: JobSpec, tokens: int) -> JobSpec:
    """The job with this algorithm.micro_batch_tokens."""
    return spec.model_copy(update={"algorithm": spec.algorithm.model_copy(update={"micro_batch_tokens": tokens})})
