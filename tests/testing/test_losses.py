"""The check of losses: the registered ones pass it, and broken ones are named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from runner.algorithm.loss_registry import built_in
from runner.interfaces.losses import (
    ImportanceWeights,
    PreferenceLosses,
    advantage,
    aggregation,
    correction,
    divergence,
    kl_estimator,
    policy_loss,
    preference_loss,
)
from runner.testing import check_loss

WORDS = {"paper": "None", "formula": "none"}


@pytest.mark.parametrize("function", [one.function for kind in built_in().values() for one in kind.values()])
def test_registered_losses(function: Callable[..., Any]) -> None:
    check_loss(function)


@policy_loss("mean", **WORDS)
def mean(ratio: Tensor, advantages: Tensor) -> Any:
    return -(ratio * advantages).mean(), {}


@policy_loss("detached", **WORDS)
def detached(logprobs: Tensor, advantages: Tensor) -> Any:
    return -logprobs.detach() * advantages, {}


@policy_loss("whitened", **WORDS)
def whitened(logprobs: Tensor, advantages: Tensor) -> Any:
    return -logprobs * (advantages - advantages.mean()), {}


@policy_loss("scalar", **WORDS)
def scalar(logprobs: Tensor, advantages: Tensor) -> Any:
    return -logprobs * advantages, {"mine": logprobs.mean()}


@policy_loss("row_sums", **WORDS)
def row_sums(logprobs: Tensor, advantages: Tensor, row: Tensor) -> Any:
    return -torch.zeros_like(logprobs).index_add(0, row, logprobs)[row] * advantages, {}


@policy_loss("prompts", **WORDS)
def prompts(logprobs: Tensor, advantages: Tensor) -> Any:
    return -logprobs * advantages, {"mine": torch.full_like(logprobs, float(advantages[0]))}


@policy_loss("divides", **WORDS)
def divides(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Any:
    weight = (logprobs - logprobs.detach()).exp() / advantages.abs()
    return torch.where(mask, -weight * advantages, 0), {}


@advantage("not_a_number", **WORDS)
def not_a_number(rewards: Tensor) -> Tensor:
    return rewards - rewards.nanmean()


@advantage("noisy", **WORDS)
def noisy(rewards: Tensor) -> Tensor:
    return torch.where(rewards.isnan(), 0, torch.rand_like(rewards))


@advantage("one", **WORDS)
def one(rewards: Tensor) -> Tensor:
    return rewards.nan_to_num().sum()


@kl_estimator("biased", **WORDS)
def biased(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    return logprobs - reference_logprobs + 1


@kl_estimator("fixed", **WORDS)
def fixed(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    return (logprobs - reference_logprobs).detach()


@kl_estimator("centered", **WORDS)
def centered(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    difference = logprobs - reference_logprobs
    return difference - difference.mean()


@preference_loss("joint", **WORDS)
def joint(chosen_logprobs: Tensor, rejected_logprobs: Tensor) -> PreferenceLosses:
    margin = chosen_logprobs - rejected_logprobs
    return PreferenceLosses(margin.softmax(0), margin, margin)


@preference_loss("bare", **WORDS)
def bare(chosen_logprobs: Tensor, rejected_logprobs: Tensor) -> Any:
    return rejected_logprobs - chosen_logprobs


@aggregation("everything", **WORDS)
def everything(mask: Tensor, tokens: int) -> Tensor:
    return torch.ones_like(mask) / tokens


@correction("halved", **WORDS)
def halved(log_ratio: Tensor) -> ImportanceWeights:
    return ImportanceWeights(log_ratio.exp() / 2, log_ratio > 0)


@correction("normalized", **WORDS)
def normalized(log_ratio: Tensor) -> ImportanceWeights:
    return ImportanceWeights(log_ratio.exp() / log_ratio.exp().mean(), log_ratio > 0)


@divergence("entropic", **WORDS)
def entropic(teacher: Tensor, student: Tensor) -> Tensor:
    return -(teacher.exp() * student).sum(-1)


@divergence("averaged", **WORDS)
def averaged(teacher: Tensor, student: Tensor) -> Tensor:
    return (teacher - student).square().mean() + 0 * student.sum(-1)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (print, "has no decorator"),
        (mean, r"the loss: expected a tensor of shape \[10\]"),
        (detached, "no finite gradient reaches the policy"),
        (whitened, "depends on other rows"),
        (scalar, r"mine: expected a tensor of shape \[10\]"),
        (row_sums, "depend on values outside the mask"),
        (prompts, "depend on values outside the mask"),
        (divides, "no finite gradient reaches the policy"),
        (not_a_number, "0 where the reward is NaN"),
        (noisy, "other numbers when it is called again"),
        (one, "a number for each row"),
        (biased, "of a policy from itself is 0"),
        (fixed, "a penalty in the loss has a gradient"),
        (centered, "the estimate of a token depends on other tokens"),
        (joint, "depends on other pairs"),
        (bare, "expected PreferenceLosses"),
        (everything, "not trained has the weight 0"),
        (halved, "two policies are one the weight is 1"),
        (normalized, "the weight of a token depends on other rows"),
        (entropic, "from itself is 0"),
        (averaged, "depends on other tokens"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_violation_is_named(function: Callable[..., Any], said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        check_loss(function)
