"""SAPO against its paper's formula (2511.20347, section 3) in plain floats, and the name and options that it has."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runner.algorithm.loss_registry import resolved_options, selected_function
from runner.algorithm.policy.config import GrpoConfig
from runner.algorithm.policy.losses import sapo
from runner.cli.job_builder import compose_job
from runner.cli.main import main
from runner.core.errors import SpecError
from tests.algorithm.harness import job_of
from tests.algorithm.policy.test_policy_gradient import SMALL


def gate(ratio: float, tau: float) -> float:
    """f(r) = 4/τ · σ(τ·(r − 1))."""
    return 4 / tau / (1 + math.exp(-tau * (ratio - 1)))


def slope(ratio: float, tau: float) -> float:
    """f'(r) = 4·p·(1 − p), p = σ(τ·(r − 1)): 1 at r = 1 for every τ."""
    p = 1 / (1 + math.exp(-tau * (ratio - 1)))
    return 4 * p * (1 - p)


@given(st.floats(-3, 3), st.floats(-4, 4), st.floats(0.1, 5), st.floats(0.1, 5))
def test_value_and_gradient(log_ratio: float, advantage: float, positive: float, negative: float) -> None:
    r, tau = math.exp(log_ratio), positive if advantage > 0 else negative
    logprob = torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([advantage], dtype=torch.float64)
    loss, diagnostics = sapo(logprob.exp(), advantages, tau_positive=positive, tau_negative=negative)
    loss.backward()
    assert loss.item() == pytest.approx(-advantage * gate(r, tau), rel=1e-9, abs=1e-12)
    assert logprob.grad.item() == pytest.approx(-advantage * slope(r, tau) * r, rel=1e-9, abs=1e-12)
    assert diagnostics == {}


def test_the_defaults_are_the_papers_and_what_is_set_wins() -> None:
    assert resolved_options(GrpoConfig(policy_loss="sapo"), "policy_loss") == {
        "tau_positive": 1.0,
        "tau_negative": 1.05,
    }
    config = GrpoConfig(policy_loss="sapo", tau_negative=2.0)
    assert resolved_options(config, "policy_loss") == {"tau_positive": 1.0, "tau_negative": 2.0}
    assert selected_function(config, "policy_loss").paper == "SAPO 2511.20347"


def test_a_job_trains_with_it() -> None:
    """At ratio 1 the gate is 2/τ, so the first loss of a step is −Σ weight·A·2/τ."""
    job = job_of(GrpoConfig(**SMALL, policy_loss="sapo", tau_positive=2.0, tau_negative=4.0))
    job.publish(0)
    batch = next(iter(job.algorithm.prepare(job.algorithm.collect(0), job.models)))
    advantages, weight = batch.tokens["advantages"], batch.tokens["weight"].double()
    outputs = {name: batch.tokens["sampled"] for name in ("logprobs", "entropy")}
    got = job.algorithm.losses["policy"](batch, outputs)
    tau = torch.where(advantages > 0, 2.0, 4.0)
    expected = torch.where(weight != 0, weight * -advantages * 2 / tau, 0).sum()
    torch.testing.assert_close(got.total.double(), expected.double())
    assert got.metrics.result()["policy/clip_frac_low"] == 0


def test_it_is_listed_explained_and_its_options_are_its_own(
    workdir: object, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "loss", "algorithm=sapo", "algorithm.tau_negative=1.2"]) == 0
    printed = capsys.readouterr().out
    assert "(policy_loss=sapo; SAPO 2511.20347)" in printed and "algorithm.tau_negative=1.2 " in printed
    assert main(["explain", "algorithm.policy_loss", "algorithm=grpo"]) == 0
    assert "policy_loss=sapo   −A·(4/τ)·sigmoid(τ·(r − 1))" in capsys.readouterr().out
    with pytest.raises(SpecError, match="not used with policy_loss=clip; it belongs to policy_loss=sapo"):
        compose_job(["+recipe=grpo_demo", "algorithm.tau_positive=1.0"])
