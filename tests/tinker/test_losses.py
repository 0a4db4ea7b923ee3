"""The five losses against formulas in float64, value and gradient; data of every form against a plain forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from runner.core.errors import DataError
from runner.interfaces import LOGPROBS, ModelLimits
from runner.tinker.losses import LOSSES, check_data, check_loss, pack_data, split_logprobs
from runner.tinker.messages import Datum
from tests.model.zoo import VOCAB, causal

LIMITS = ModelLimits(frozenset(), VOCAB, (40, "the model has 40 positions"))


def reference(name: str, lp: Any, w: Any, q: Any, a: Any, config: Mapping[str, float]) -> tuple[float, Any]:
    """Value and gradient in lp, in numpy: derivatives are written down."""
    r = np.exp(lp - q)
    if name == "cross_entropy":
        return -(w * lp).sum(), -w
    if name == "importance_sampling":
        return -(r * a).sum(), -r * a
    low, high = config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2)
    if name == "ppo":
        clipped = np.clip(r, low, high)
        is_free = r * a <= clipped * a
        return -np.where(is_free, r, clipped) @ a, np.where(is_free, -r * a, 0)
    if name == "cispo":
        low, high = config.get("clip_low_threshold", 0.0), config.get("clip_high_threshold", 4.0)
        return -(np.clip(r, low, high) * lp * a).sum(), -np.clip(r, low, high) * a
    beta = config.get("beta", 0.05)
    return -(lp * a - beta / 2 * (lp - q) ** 2).sum(), -(a - beta * (lp - q))


CONFIGS: list[tuple[str, dict[str, float]]] = [
    *((name, {}) for name in LOSSES),
    ("ppo", {"clip_low_threshold": 0.5, "clip_high_threshold": 1.05}),
    ("cispo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
    ("dro", {"beta": 0.7}),
]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize(("name", "config"), CONFIGS)
def test_a_loss_is_its_formula(name: str, config: dict[str, float], dtype: torch.dtype, bound: float) -> None:
    chance = np.random.default_rng(3)
    lp, q, w, a = (chance.normal(size=200).astype(np.float32).astype(np.float64) for _ in range(4))
    lp, q = -abs(lp), -abs(q)
    value, gradient = reference(name, lp, w, q, a, config)
    given, *others = (torch.tensor(one, dtype=dtype) for one in (lp, w, q, a))
    total = LOSSES[name](given.requires_grad_(), *others, **check_loss(name, config).options)
    total.sum().backward()
    assert abs(float(total.detach().sum(dtype=torch.float64)) / value - 1) <= bound
    assert given.grad is not None
    np.testing.assert_allclose(given.grad.numpy(), gradient, rtol=bound, atol=bound)


def test_a_ratio_that_is_multiplied_by_zero_cannot_overflow() -> None:
    lp = torch.tensor([-1.0], requires_grad=True)
    zero = torch.zeros(1)
    LOSSES["importance_sampling"](lp, zero, torch.tensor([-1000.0]), zero).sum().backward()
    assert lp.grad is not None and float(lp.grad) == 0


def data(name: str) -> list[Datum]:
    """Rows whose targets are the next tokens, others, and several at each position, by name."""
    chance = np.random.default_rng(5)
    rows = [chance.integers(0, VOCAB, size=size) for size in (1, 9, 4)]
    width = (3,) if name == "top" else ()
    found = []
    for row in rows:
        targets = chance.integers(0, VOCAB, size=(len(row), *width))
        if name == "next":
            targets = np.append(row[1:], 7)
        found.append(Datum(row, {"target_tokens": targets, "weights": chance.normal(size=targets.shape)}))
    return found


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("name", ["next", "other", "top"])
def test_log_probabilities_are_those_of_a_plain_pass(name: str, layout: str) -> None:
    model, rows = causal("qwen2"), data(name)
    model.layout = layout
    if layout == "padded":
        model.inner.set_attn_implementation(model.default_attention)
    batch = pack_data(rows)
    found = split_logprobs(model.outputs(batch, LOGPROBS)["logprobs"], rows)
    for datum, own in zip(rows, found, strict=True):
        targets = torch.as_tensor(datum.inputs["target_tokens"])
        with torch.no_grad(), model._own_attention():
            logits = model.inner(torch.as_tensor(datum.ids)[None]).logits[0]
        wanted = logits.log_softmax(-1).gather(1, targets.reshape(len(datum.ids), -1)).reshape(targets.shape)
        assert own.shape == targets.shape
        np.testing.assert_allclose(own, wanted.numpy(), atol=2e-5)


def test_a_loss_sums_over_all_positions() -> None:
    model, rows = causal("qwen2"), data("top")
    batch = pack_data(rows)
    outputs = model.outputs(batch, LOGPROBS)
    total = check_loss("cross_entropy", {})(batch, outputs).total
    pairs = zip(rows, split_logprobs(outputs["logprobs"], rows), strict=True)
    wanted = -sum((datum.inputs["weights"] * own).sum() for datum, own in pairs)
    assert abs(float(total.detach()) - wanted) < 1e-4


ROW = np.asarray([1, 2, 3])
REFUSED = {
    "its model_input is empty": Datum(ROW[:0], {"target_tokens": ROW[:0]}),
    "exceed 40: the model has 40 positions": Datum(np.ones(40, int), {"target_tokens": np.ones(40, int)}),
    "lack target_tokens": Datum(ROW, {}),
    "have shape \\[2\\], but model_input has 3": Datum(ROW, {"target_tokens": ROW[:2]}),
    "weights have shape \\[2\\]": Datum(ROW, {"target_tokens": ROW, "weights": np.ones(2)}),
    "NaN or infinite": Datum(ROW, {"target_tokens": ROW, "weights": np.asarray([1, np.nan, 1])}),
    "have mask, which this loss does not read": Datum(ROW, {"target_tokens": ROW, "mask": np.ones(3)}),
    "model_input has the id 302": Datum(ROW + 299, {"target_tokens": ROW}),
    "target_tokens has the id -1": Datum(ROW, {"target_tokens": ROW - 2}),
}


@pytest.mark.parametrize("said", REFUSED)
def test_data_that_cannot_be_computed_are_refused_by_number(said: str) -> None:
    good = Datum(ROW, {"target_tokens": ROW})
    check_data([good], "cross_entropy", LIMITS, forward_only=False)
    with pytest.raises(DataError, match=f"datum 1: .*{said}"):
        check_data([good, REFUSED[said]], "cross_entropy", LIMITS, forward_only=False)


def test_a_loss_that_is_not_known_is_refused_by_name() -> None:
    with pytest.raises(DataError, match="loss_fn 'gspo' is not supported; there are: cross_entropy"):
        check_loss("gspo", {})
    with pytest.raises(DataError, match="'ppo' has no option 'beta'"):
        check_loss("ppo", {"beta": 1.0})
    with pytest.raises(DataError, match="expected a number"):
        check_loss("dro", {"beta": "much"})
