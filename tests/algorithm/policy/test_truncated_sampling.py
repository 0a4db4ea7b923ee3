"""Truncated sampling (top_p, top_k, min_p) and the ratios that are learned from: 1 before any update."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from runner.algorithm.policy.config import GrpoConfig
from runner.trainer.callbacks import LogStep
from runner.trainer.loop import run_loop
from tests.algorithm.harness import job_of

COLD = 0.1  # or the logits of an untrained model are too flat for min_p to cut any
TRUNCATED: list[dict[str, Any]] = [{"top_p": 0.5}, {"top_k": 8}, {"min_p": 0.2}]
WAYS = [
    (lag, correction)
    for lag in (0, 1, 2)
    for correction in ("none", "tis", "mis", "decoupled")
    if lag < 2 or correction == "decoupled"  # another one is refused
]


def first_step(lag: int, correction: str, **options: Any) -> Mapping[str, float]:
    config = GrpoConfig(batch_size=4, group_size=4, micro_batch_tokens=10**6, lag=lag, correction=correction)
    seen: list[Mapping[str, float]] = []
    run_loop(job_of(config, callbacks=[LogStep([lambda step, values: seen.append(values)])], **options), 0)
    return seen[0]


@pytest.mark.parametrize(
    ("lag", "correction", "sampling", "double"),
    [
        pytest.param(
            *(*way, sampling, double),
            id=f"{way}-{sampling}-{'float64' if double else 'float32'}",
            marks=[] if (row + column) % 2 == double else pytest.mark.slow,  # each pair of choices once is quick
        )
        for row, way in enumerate(WAYS)
        for column, sampling in enumerate(TRUNCATED)
        for double in (False, True)
    ],
)
def test_the_ratio_is_1_before_an_update(lag: int, correction: str, sampling: Any, double: bool) -> None:
    values, near = first_step(lag, correction, double=double, temperature=COLD, **sampling), 1e-6 if double else 1e-4
    assert values["policy/ratio"] == pytest.approx(1, abs=near)
    assert values["mismatch/logprob_diff"] < near and values["train/tokens"] > 0
    assert values["policy/clip_frac_low"] == values["policy/clip_frac_high"] == 0
    if correction != "none":
        assert values["correction/effective_sample_size"] == pytest.approx(1, abs=near)
        assert values["correction/clip_frac"] == 0
        whole = first_step(lag, "none" if lag < 2 else correction, double=double, temperature=COLD, **sampling)
        assert values["train/grad_norm"] == pytest.approx(whole["train/grad_norm"], rel=10 * near)


@pytest.mark.parametrize("sampling", TRUNCATED, ids=str)
def test_what_truncation_costs_is_measured(sampling: Any) -> None:
    """KL(truncated ‖ whole) = −E log of the kept mass, by a plain forward pass over every answer."""
    config = GrpoConfig(batch_size=4, group_size=4, micro_batch_tokens=10**6)
    job = job_of(config, temperature=COLD, **sampling)
    job.publish(0)
    experience: Any = job.algorithm.collect(0)
    model: Any = job.models["policy"]
    costs = []
    for group in experience.groups:
        for one in group.samples:
            with model.model._generation_mode(), torch.no_grad():
                logits = model.model.causal(input_ids=torch.tensor([(*group.prompt.ids, *one.ids)])).logits[0]
            for p in (logits[len(group.prompt.ids) - 1 : -1].double() / COLD).softmax(-1):
                ordered = p.sort(descending=True).values
                kept = ordered[: sampling.get("top_k")]
                kept = kept[kept.cumsum(0) - kept < sampling.get("top_p", 1)]
                costs.append(-math.log(kept[kept >= sampling.get("min_p", 0) * ordered[0]].sum()))
    found = job.algorithm.describe(0, experience)[0]["rollout/truncation_kl"]
    assert found == pytest.approx(sum(costs) / len(costs), rel=1e-4) and found > 0.05
    assert job.algorithm.decode(job.algorithm.encode(experience)) == experience


def test_nothing_is_said_of_a_truncation_that_is_none() -> None:
    assert "rollout/truncation_kl" not in first_step(0, "none")


def test_metrics_of_log_probabilities_that_a_sampler_cannot_report_are_absent() -> None:
    job = job_of(GrpoConfig(batch_size=4, micro_batch_tokens=10**6), top_k=8, callbacks=[])
    sampler: Any = job.algorithm.parts.sampler  # type: ignore[attr-defined]
    honest = sampler.sample
    sampler.sample = lambda requests: [replace(one, raw_logprobs=None) for one in honest(requests)]
    seen: list[Mapping[str, float]] = []
    job.callbacks.append(LogStep([lambda step, values: seen.append(values)]))  # type: ignore[attr-defined]
    run_loop(job, 0)
    assert not [name for name in seen[0] if name.startswith(("mismatch/", "rollout/truncation_kl"))]
    assert math.isfinite(seen[0]["train/loss"])


def test_importance_weights_of_no_token_have_no_metrics() -> None:
    values = first_step(0, "tis", rate=lambda completion: None)
    assert values["train/tokens"] == 0 and not [name for name in values if name.startswith(("correction/", "policy/"))]
