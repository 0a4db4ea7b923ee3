"""The check of a registered loss, advantage, KL estimator, preference loss, aggregation, correction or
divergence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from runner.interfaces.losses import Registration, registration_of, result_fault
from runner.testing.components import require

ROW = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 3, 3])  # of ten tokens
MASK = torch.tensor([False, True, True, True, True, False, True, True, False, True])
GROUP = torch.tensor([0, 0, 1, 1])  # of four rows
LENGTHS = torch.tensor([2, 2, 2, 1])
Inputs = dict[str, Any]


def check_loss(function: Callable[..., Any]) -> None:
    """Check shapes, gradients and independence of a function decorated by `runner.interfaces.losses`.

    Its values may depend on nothing but their own token, row or pair.

    Of an aggregation and an advantage, only what their kind promises of each token or row.
    """
    one = registration_of(function)
    if one is None:
        raise AssertionError(f"{function!r} has no decorator of runner.interfaces.losses, such as @policy_loss")
    require(bool(one.paper and one.formula), f"{one.name} has no paper or formula for `run explain loss`")
    {
        "policy_loss": _check_policy_loss,
        "advantage": _check_advantage,
        "kl_estimator": _check_kl_estimator,
        "preference_loss": _check_preference_loss,
        "aggregation": _check_aggregation,
        "correction": _check_correction,
        "divergence": _check_divergence,
    }[one.kind](one)


def _call_registered(one: Registration, inputs: Mapping[str, Any], size: int | None = None) -> Any:
    """The result; size: of what the inputs have, whose shapes and data types the result must have."""
    result = one.function(**{name: inputs[name] for name in one.inputs})
    fault = None if size is None else result_fault(one, result, size)
    require(fault is None, f"{one.name}: {fault}")
    return result


def _normal(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def _policy_inputs(outside: float | None = None) -> Inputs:
    """Inputs of a policy loss; outside: moves what stands outside the mask, which is finite in a job."""
    logprobs, advantages = -_normal(10).abs() - 0.1, _normal(10, seed=2)
    old = logprobs + 0.3 * _normal(10, seed=1)
    if outside is not None:
        logprobs, old = torch.where(MASK, logprobs, outside - 10), torch.where(MASK, old, -outside - 10)
        advantages = torch.where(MASK, advantages, outside)
    logprobs.requires_grad_()
    inputs: Inputs = {"logprobs": logprobs, "old_logprobs": old, "ratio": (logprobs - old).exp()}
    return inputs | {"advantages": advantages, "mask": MASK, "row": ROW}


def _check_policy_loss(one: Registration) -> None:
    inputs = _policy_inputs()
    loss, diagnostics = _call_registered(one, inputs, 10)
    require(bool(loss[MASK].isfinite().all()), f"{one.name}: the loss of trained tokens is finite; got {loss}")
    _check_gradient(one, loss[MASK], [inputs["logprobs"]])
    loose = (inputs[name].requires_grad for name in ("old_logprobs", "advantages"))
    require(not any(loose), f"{one.name} changes its inputs in place")
    part = ROW != 1  # a micro-batch that has not all rows
    few = _call_registered(one, {name: value[part] for name, value in inputs.items()})[0]
    same = torch.allclose(few[MASK[part]], loss[part][MASK[part]])
    require(same, f"{one.name}: the loss of a token depends on other rows, which another micro-batch may have")
    for outside in (-9.0, 0.0, 9.0):  # also advantages of 0
        moved = _policy_inputs(outside)
        other, others = _call_registered(one, moved, 10)
        pairs = [(other, loss), *((others[name], value) for name, value in diagnostics.items())]
        same = all(torch.allclose(a[MASK].double(), b[MASK].double()) for a, b in pairs)
        require(same, f"{one.name}: trained tokens depend on values outside the mask, which are arbitrary")
        _check_gradient(one, other[MASK], [moved["logprobs"]])


def _check_gradient(one: Registration, losses: Tensor, learning: list[Tensor]) -> None:
    """Something of `learning` gets a gradient that is finite and not 0."""
    text = f"{one.name}: no finite gradient reaches the policy"
    require(losses.requires_grad, text)
    weights = torch.arange(1.0, len(losses) + 1)  # so that what cancels out in the sum is seen
    gradients = torch.autograd.grad((losses * weights).sum(), learning, allow_unused=True)
    require(any(g is not None and bool(g.any()) and bool(g.isfinite().all()) for g in gradients), text)


def _check_advantage(one: Registration) -> None:
    rewards = torch.tensor([1.0, float("nan"), 0.25, 0.5], dtype=torch.float64)
    token_rewards = torch.zeros(10, dtype=torch.float64)
    token_rewards[[2, 4, 7, 9]] = rewards.nan_to_num()
    inputs: Inputs = {"rewards": rewards, "group": GROUP, "lengths": LENGTHS, "token_rewards": token_rewards}
    inputs |= {"mask": MASK, "row": ROW}
    size = 10 if one.per_token else 4
    made = _call_registered(one, inputs, size)
    trained = made[MASK] if one.per_token else made
    require(
        bool(trained.isfinite().all()), f"{one.name}: an advantage is finite, 0 where the reward is NaN; got {made}"
    )
    if "rewards" in one.inputs and not one.per_token:
        require(float(made[1]) == 0, f"{one.name}: a row without a reward (NaN) has the advantage 0; got {made[1]}")
    require(torch.equal(_call_registered(one, inputs), made), f"{one.name} gives other numbers when it is called again")


def _check_kl_estimator(one: Registration) -> None:
    logprobs = (-_normal(10).abs() - 0.1).requires_grad_()
    reference = (logprobs + 0.5 * _normal(10, seed=1)).detach()
    inputs: Inputs = {"logprobs": logprobs, "reference_logprobs": reference, "ratio": torch.ones(10)}
    inputs |= {"max_log_ratio": 20.0}
    made = _call_registered(one, inputs, 10)
    require(bool(made.isfinite().all()), f"{one.name} returns finite numbers; got {made!r}")
    zero = _call_registered(one, inputs | {"reference_logprobs": logprobs.detach()})
    text = f"{one.name}: the KL divergence of a policy from itself is 0; got {zero}"
    require(torch.allclose(zero, torch.zeros(10), atol=1e-6), text)
    few = _call_registered(one, {n: x[MASK] if isinstance(x, Tensor) else x for n, x in inputs.items()})
    require(torch.allclose(few, made[MASK]), f"{one.name}: the estimate of a token depends on other tokens")
    if one.kl_in == "loss":
        require(
            made.requires_grad, f"{one.name}: a penalty in the loss has a gradient; declare kl_in='reward' otherwise"
        )


def _check_preference_loss(one: Registration) -> None:
    names = ("chosen_log_ratios", "rejected_log_ratios", "chosen_logprobs", "rejected_logprobs")
    inputs: Inputs = {name: (-_normal(4, seed=at).abs()).requires_grad_() for at, name in enumerate(names)}
    inputs |= {"chosen_lengths": torch.tensor([3, 1, 4, 2]), "rejected_lengths": torch.tensor([2, 2, 5, 1])}
    made = _call_registered(one, inputs, 4)
    require(bool(made[0].isfinite().all()), f"{one.name}: losses are finite; got {made[0]}")
    learning = [inputs[name] for name in one.inputs if name in names]
    _check_gradient(one, made[0], learning)
    few = _call_registered(one, {name: value[:2] for name, value in inputs.items()})[0]
    require(torch.allclose(few, made[0][:2]), f"{one.name}: the loss of a pair depends on other pairs")


def _check_aggregation(one: Registration) -> None:
    inputs: Inputs = {"mask": MASK.float(), "row": ROW, "group": GROUP[ROW], "tokens": 7, "rows": 4, "groups": 2}
    inputs["max_length"] = 8.0
    made = _call_registered(one, inputs, 10)
    require(bool(made.isfinite().all()), f"{one.name} returns finite weights; got {made!r}")
    require(not bool(made[~MASK].any()), f"{one.name}: a token that is not trained has the weight 0; got {made}")
    require(bool((made[MASK] > 0).all()), f"{one.name}: a trained token has a weight above 0; got {made}")


def _check_correction(one: Registration) -> None:
    inputs: Inputs = {"log_ratio": torch.where(MASK, 0.3 * _normal(10), 0), "mask": MASK, "row": ROW}
    made = _call_registered(one, inputs, 10)
    kept = made[0][MASK]
    require(bool((kept.isfinite() & (kept >= 0)).all()), f"{one.name}: a weight is finite and at least 0; got {kept}")
    part = ROW != 1
    few = _call_registered(one, {name: value[part] for name, value in inputs.items()})[0]
    require(torch.allclose(few, made[0][part]), f"{one.name}: the weight of a token depends on other rows")
    same = _call_registered(one, inputs | {"log_ratio": torch.zeros(10)})[0]
    require(bool((same[MASK] == 1).all()), f"{one.name}: where the two policies are one the weight is 1; got {same}")


def _check_divergence(one: Registration) -> None:
    student = _normal(4, 6).requires_grad_()
    inputs: Inputs = {"teacher": _normal(4, 6, seed=1).log_softmax(-1), "student": student.log_softmax(-1)}
    made = _call_registered(one, inputs, 4)
    fits = bool((made.isfinite() & (made > 0)).all())
    require(fits, f"{one.name} returns finite numbers above 0 for two distributions, [S]; got {made!r}")
    _check_gradient(one, made, [student])
    zero = _call_registered(one, inputs | {"student": inputs["teacher"]})
    text = f"{one.name}: the divergence of a distribution from itself is 0; got {zero}"
    require(torch.allclose(zero, torch.zeros(4), atol=1e-6), text)
    few = _call_registered(one, {name: value[:2] for name, value in inputs.items()})
    require(torch.allclose(few, made[:2]), f"{one.name}: the divergence of a token depends on other tokens")
