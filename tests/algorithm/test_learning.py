"""Each family learns something in seconds, from random weights. (Preferences and reward models: in their own tests.)"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from runner.algorithm.config import SftConfig
from runner.algorithm.policy.config import GrpoConfig, PolicyConfig, PpoConfig
from runner.algorithm.sft import build as build_sft
from runner.interfaces import EnvironmentFactory, TokenizedExample
from runner.interfaces.learning import AlgorithmInputs
from runner.trainer.callbacks import LogStep
from runner.trainer.loop import run_loop
from tests.algorithm.harness import Nods, job_of
from tests.algorithm.preferences import Given, learner, model, pairs, train

SIZE: dict[str, Any] = {"batch_size": 8, "micro_batch_tokens": 10**6}
FAMILIES: dict[str, tuple[PolicyConfig, int]] = {  # and how many steps it takes
    "grpo": (GrpoConfig(**SIZE), 20),
    "gspo": (
        GrpoConfig(
            **SIZE, importance_sampling_level="sequence", loss_aggregation="seq_mean_token_mean", mini_batches=2
        ),
        14,
    ),
    "grpo, lag 2": (GrpoConfig(**SIZE, lag=2, correction="decoupled"), 20),
    "ppo": (PpoConfig(**SIZE, group_size=8, epochs=2), 16),
}


def rewards(config: PolicyConfig, steps: int, **options: Any) -> list[float]:
    """The mean reward of each step."""
    seen: list[Mapping[str, float]] = []
    run_loop(job_of(config, steps, callbacks=[LogStep([lambda step, values: seen.append(values)])], **options), 0)
    return [values["reward/mean"] for values in seen]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_policy_learns_what_is_rewarded(name: str) -> None:
    found = rewards(*FAMILIES[name])
    assert max(found[:2]) < 0.55 and min(found[-3:]) > 0.7, found


def test_a_policy_learns_over_several_turns() -> None:
    found = rewards(GrpoConfig(**SIZE), 20, environments=EnvironmentFactory(Nods, 2))
    assert max(found[:2]) < 0.55 and min(found[-3:]) > 0.7, found


def test_imitation_learns_what_it_is_shown() -> None:
    shown = [
        TokenizedExample((*p.prompt, *p.chosen), (0.0,) * len(p.prompt) + (1.0,) * len(p.chosen))
        for p in pairs(16, seed=3)
    ]
    algorithm = build_sft(SftConfig(batch_size=16), AlgorithmInputs(Given(shown), None, 0, lambda *words: None))
    values = train(learner(model(5), lr=1.0), algorithm, {}, 60)
    assert values[0]["train/loss"] > 4 and values[-1]["train/loss"] < 0.5, values[-1]
