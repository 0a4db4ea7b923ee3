"""PPO with its critic on the policy's backbone: one role, one loss, one pass, against the formula written out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from runner.algorithm.policy.config import PpoConfig
from runner.core.batch import Batch
from runner.interfaces import Outputs
from runner.trainer.callbacks import LogStep
from runner.trainer.loop import TrainingJob, run_loop
from tests.algorithm.harness import even_bytes, job_of

CONFIG = PpoConfig(
    batch_size=4, group_size=3, micro_batch_tokens=40, critic="shared", value_coef=0.3, entropy_coef=0.05, gamma=0.9
)


def job_with_values(config: PpoConfig = CONFIG, **options: Any) -> TrainingJob:
    """A job whose value head is not zero."""
    job = job_of(config, **options)
    head = model(job).value_head
    head.data = torch.randn(len(head), generator=torch.Generator().manual_seed(3))
    return job


def model(job: TrainingJob) -> Any:
    learner: Any = job.learners["policy"]
    return learner.model


def gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """Generalised advantages of one answer, from its end to its start."""
    found, after, following = [0.0] * len(rewards), 0.0, 0.0
    for t in reversed(range(len(rewards))):
        after = rewards[t] + gamma * following - values[t] + gamma * lam * after
        found[t], following = after, values[t]
    return found


def written_out(job: TrainingJob, config: PpoConfig) -> Tensor:
    """The first mini-batch's loss from plain passes over single answers."""
    experience = job.algorithm.collect(0)
    made = model(job)
    causal, head = made.causal, made.value_head
    rows: list[tuple[Tensor, Tensor, Tensor, list[float], list[float]]] = []
    with made._own_attention():
        for one, prompt in ((s, g.prompt.ids) for g in experience.groups for s in g.samples):
            ids, start = torch.tensor([[*prompt, *one.ids]]), len(prompt) - 1
            hidden = causal.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, start:-1]
            drawn = torch.distributions.Categorical(logits=causal.lm_head(hidden))
            values = hidden @ head
            advantages = gae([0.0] * (len(one.ids) - 1) + [one.reward], values.tolist(), config.gamma, config.lam)
            returns = [a + v for a, v in zip(advantages, values.tolist(), strict=True)]
            rows.append((drawn.log_prob(ids[0, start + 1 :]), drawn.entropy(), values, advantages, returns))
    logprobs, entropy, values = (torch.cat([row[at] for row in rows]) for at in range(3))  # type: ignore[misc]
    advantages, returns = (torch.tensor([x for row in rows for x in row[at]]) for at in (3, 4))
    white = (advantages - advantages.mean()) / advantages.std(correction=0)
    surrogate = -(logprobs - logprobs.detach()).exp() * white
    error = (values - returns).square() / 2  # before the first update no value is clipped
    return (surrogate - config.entropy_coef * entropy + (config.value_coef or 0.1) * error).mean()


def test_loss_and_gradients_are_those_of_the_formula() -> None:
    job = job_with_values()
    job.publish(0)
    names, parameters = zip(*model(job).trainable().items(), strict=True)
    wanted = written_out(job, CONFIG)
    grads = dict(zip(names, torch.autograd.grad(wanted, parameters), strict=True))
    batch = next(iter(job.algorithm.prepare(job.algorithm.collect(0), job.models)))
    [(role, loss)] = job.algorithm.losses.items()
    assert role == "policy" and list(job.learners) == ["policy"] and "branch" in batch.rows
    metrics = job.learners[role].forward_backward(batch, loss)[0].result()
    total = metrics["train/loss"] + 0.3 * metrics["critic/loss"]
    assert total == pytest.approx(float(wanted.detach()), rel=1e-4) and "value_head" in grads
    for name, parameter in model(job).trainable().items():
        assert float((parameter.grad - grads[name]).norm()) <= 1e-4 * float(grads[name].norm()), name


def test_old_log_probabilities_and_values_come_from_one_pass() -> None:
    job = job_with_values(CONFIG.model_copy(update={"mini_batches": 2}))
    job.publish(0)
    asked: list[frozenset[str]] = []
    learner: Any = job.learners["policy"]
    forward = learner.forward

    def counted(batch: Batch, needs: frozenset[str]) -> Outputs:
        asked.append(needs)
        return forward(batch, needs)

    learner.forward = counted
    parts = list(job.algorithm.prepare(job.algorithm.collect(0), job.models))
    assert asked == [frozenset({"logprobs", "values"})]
    assert all(part.tokens["values"].any() and part.tokens["old"].any() for part in parts)
    roots = torch.cat([part.tokens["values"][part.tokens["parent"] < 0] for part in parts])
    assert len(roots) and not roots.any()


def test_a_run_learns_its_values_ahead_of_the_trainer_too() -> None:
    """At lag 1 the sampler's copy takes the weights, the value head included, and the value error falls."""
    seen: list[Mapping[str, float]] = []
    config = PpoConfig(batch_size=16, group_size=2, lag=1, critic="shared", value_coef=1.0, value_clip=None)
    callbacks = [LogStep([lambda step, values: seen.append(values)])]
    run_loop(job_of(config, steps=12, rate=lambda c: 1 + even_bytes(c), callbacks=callbacks, lr=3e-3), 0)
    assert seen[-1]["critic/loss"] < seen[0]["critic/loss"] / 4
    assert not any(name in seen[0] for name in ("critic/lr", "critic/grad_norm"))


def test_a_checkpoint_holds_the_value_head() -> None:
    job, other = job_with_values(), job_of(CONFIG)
    other.learners["policy"].load_state_dict(job.learners["policy"].state_dict())
    assert torch.equal(model(other).value_head, model(job).value_head) and model(other).value_head.any()
