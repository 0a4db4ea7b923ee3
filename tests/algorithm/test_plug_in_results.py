"""What a plug-in's function returns is checked where it is used: a wrong shape is never broadcast."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from runner.algorithm import loss_registry
from runner.algorithm.loss_registry import compute_selected
from runner.algorithm.policy.config import GrpoConfig
from runner.algorithm.preference.config import DpoConfig
from runner.core.errors import SpecError
from runner.interfaces import losses
from runner.interfaces.losses import ImportanceWeights, PreferenceLosses

WORDS = {"paper": "None", "formula": "none"}
T, N = 6, 3
POLICY: dict[str, Callable[[], Any]] = {
    "logprobs": lambda: torch.full((T,), -1.0, requires_grad=True),
    "ratio": lambda: torch.ones(T, requires_grad=True),
    "advantages": lambda: torch.ones(T),
    "mask": lambda: torch.tensor([False, True, True, True, True, True]),
    "row": lambda: torch.arange(T) // 2,
    "log_ratio": lambda: torch.zeros(T),
    "rewards": lambda: torch.ones(N),
    "group": lambda: torch.zeros(N, dtype=torch.long),
    "reference_logprobs": lambda: torch.full((T,), -1.0),
}
PAIRS: dict[str, Callable[[], Any]] = {
    f"{side}_{name}": lambda: torch.ones(N, requires_grad=True)
    for side in ("chosen", "rejected")
    for name in ("log_ratios", "logprobs")
}


@pytest.fixture
def plug_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Register a function of a plug-in for the test."""

    def install(function: Callable[..., Any]) -> None:
        one = losses.registration_of(function)
        assert one is not None
        monkeypatch.setitem(loss_registry.functions(one.kind), one.name, one)

    yield install
    loss_registry.functions.cache_clear()


def policy(shape: Callable[[Tensor], Any]) -> Any:
    def mine(logprobs: Tensor, advantages: Tensor) -> Any:
        return shape(-logprobs * advantages)

    return losses.policy_loss("mine", **WORDS)(mine)


@pytest.mark.parametrize(
    ("result", "fault"),
    [
        (lambda loss: (loss.mean(), {}), r"the loss: expected a tensor of shape \[6\].* got a tensor of shape \[\]"),
        (lambda loss: (loss.mean()[None], {}), r"got a tensor of shape \[1\]"),
        (lambda loss: (loss[:, None], {}), r"got a tensor of shape \[6, 1\]"),
        (lambda loss: loss, r"expected \(loss \[T\], diagnostics"),
        (lambda loss: (loss, {"mine": loss.mean()}), r"mine: expected a tensor of shape \[6\]"),
        (lambda loss: (loss.long(), {}), "floating data type.*int64"),
        (lambda loss: (loss.detach(), {}), "no gradient"),
        (lambda loss: (loss / 0, {}), "5 of 5 numbers are not finite"),
        (lambda loss: (None, {}), "None"),
        (lambda loss: loss.nothing, "AttributeError: 'Tensor' object has no attribute 'nothing'"),
    ],
)
def test_a_policy_loss_is_a_number_for_each_token(
    result: Callable[[Tensor], Any], fault: str, plug_in: Callable[..., None]
) -> None:
    plug_in(policy(result))
    config = GrpoConfig.model_construct(policy_loss="mine")
    with pytest.raises(SpecError, match=fault) as caught:
        compute_selected(config, "policy_loss", POLICY)
    assert caught.value.exit_code == 2 and caught.value.problems[0].key == "algorithm.policy_loss"
    assert re.search(r"test_plug_in_results\.py:\d+, mine\)", str(caught.value))


def test_a_sound_loss_is_looked_at_for_its_values_once(plug_in: Callable[..., None]) -> None:
    """The values where nothing is trained are arbitrary, and shapes are checked at every call."""
    plug_in(policy(lambda loss: (torch.where(torch.arange(len(loss)) > 0, loss, torch.nan), {"seen": loss > 0})))
    config = GrpoConfig.model_construct(policy_loss="mine")
    for _ in range(2):
        loss, found = compute_selected(config, "policy_loss", POLICY)
        assert loss.shape == (T,) and list(found) == ["seen"]


def test_each_kind_of_function_is_checked(plug_in: Callable[..., None]) -> None:
    scalar, shape = torch.tensor(1.0), r"expected a tensor of shape \[{}\]"
    cases = [
        (losses.advantage("mine", **WORDS)(lambda rewards: rewards.mean()), "advantage", N),
        (losses.advantage("mine", **WORDS, per_token=True)(lambda rewards: rewards), "advantage", T),
        (losses.kl_estimator("mine", **WORDS)(lambda logprobs: logprobs.mean()), "kl_estimator", T),
        (losses.aggregation("mine", **WORDS)(lambda row: scalar), "loss_aggregation", T),
        (losses.correction("mine", **WORDS)(lambda mask: ImportanceWeights(scalar, mask)), "correction", T),
    ]
    for function, choice, size in cases:
        plug_in(function)
        with pytest.raises(SpecError, match=f"algorithm.{choice}.*" + shape.format(size)):
            compute_selected(GrpoConfig.model_construct(**{choice: "mine"}), choice, POLICY)
    pairs = losses.preference_loss("mine", **WORDS)(
        lambda chosen_logprobs: PreferenceLosses(*[chosen_logprobs.sum()] * 3)
    )
    plug_in(pairs)
    with pytest.raises(SpecError, match=shape.format(N)):
        compute_selected(DpoConfig.model_construct(loss="mine"), "loss", PAIRS)


def test_every_kind_has_an_input_that_gives_the_size() -> None:
    assert loss_registry.SIZED.keys() == losses.INPUTS.keys()
    assert all(name in losses.INPUTS[kind] for kind, name in loss_registry.SIZED.items())
