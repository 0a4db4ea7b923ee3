"""None of the mathematics reads a value back from the device: it runs on tensors that have none, and keeps float64.

Nor does an update between its micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from runner.algorithm import distillation, kl_divergence
from runner.algorithm.policy import losses
from runner.algorithm.policy import losses as policy_losses
from runner.algorithm.policy.advantages import (
    batch_std,
    discounted_returns,
    gae,
    group_mean,
    group_mean_std,
    kl_penalized_rewards,
    leave_one_out,
    no_baseline,
    opo,
    token_level_rewards,
    whiten,
)
from runner.algorithm.policy.config import GrpoConfig, PpoConfig
from runner.algorithm.policy.importance import (
    affected_counts,
    behavior_log_ratio,
    decoupled_weights,
    effective_sample_size,
    mis_weights,
    sampler_mismatch,
    sequence_ratio,
    tis_weights,
    token_ratio,
)
from runner.algorithm.preference import losses as preference
from runner.core.batch import Batch
from runner.core.metrics import Metrics
from runner.interfaces import Loss, Outputs
from tests.algorithm.harness import job_of

x = torch.empty(6, dtype=torch.float64, device="meta")
ids = torch.empty(6, dtype=torch.int64, device="meta")
mask = torch.empty(6, dtype=torch.bool, device="meta")

CALLS: dict[str, Callable[[], Any]] = {
    "advantages": lambda: [
        group_mean_std(x, ids, advantage_eps=1e-6),
        group_mean(x, ids),
        leave_one_out(x, ids),
        batch_std(x, ids, advantage_eps=1e-4),
        opo(x, ids, ids),
        no_baseline(x),
    ],
    "returns": lambda: [
        kl_penalized_rewards(x, x, mask, ids, 0.1),
        token_level_rewards(x, x, mask, ids, 0.1),
        discounted_returns(x, mask, ids, 0.9),
        *gae(x, x, mask, ids, gamma=0.9, lam=0.9),
        whiten(x, mask),
    ],
    "ratios": lambda: [token_ratio(x, x), sequence_ratio(x, x, mask, ids)],
    "kl": lambda: [
        kl_divergence.k1(x, x),
        kl_divergence.k2(x, x),
        kl_divergence.k3(x, x),
        kl_divergence.k3_ratio(x, x, x),
        kl_divergence.k3_plus(x, x),
    ],
    "policy": lambda: [
        policy_losses.ppo_clip(x, x, clip_low=0.2, clip_high=0.28, dual_clip=3.0),
        policy_losses.cispo(x, x, x, clip_low=0.2, clip_high=0.28),
        policy_losses.reinforce(x, x),
        policy_losses.clipped_value_loss(x, x, x, clip=0.2),
        policy_losses.entropy_bonus(x, 0.1),
    ],
    "distillation": lambda: [
        distillation.scaled_log_softmax(x[:, None], 2.0),
        kl_divergence.forward_kl(x[:, None], x[:, None]),
        kl_divergence.reverse_kl(x[:, None], x[:, None]),
        kl_divergence.jsd(x[:, None], x[:, None], beta=0.3),
        distillation.top_k_with_rest(x.view(2, 3), x.view(2, 3), 2),
    ],
    "aggregation": lambda: [
        losses.token_mean(x, 6),
        losses.seq_mean_token_mean(x, ids, 2),
        losses.seq_mean_token_sum(x, 2),
        losses.seq_mean_token_sum_norm(x, 2, 8.0),
        losses.prompt_mean(x, ids, 1),
    ],
    "correction": lambda: [
        *(behavior_log_ratio(x, x, mask, ids, level).exp() for level in ("token", "sequence")),
        *(c.weights for c in (tis_weights(x), mis_weights(x), decoupled_weights(x))),
        affected_counts(tis_weights(x), mask),
        *sampler_mismatch(x, x, mask).values(),
        effective_sample_size(x, mask),
    ],
    "preference": lambda: [
        preference.sigmoid(x, x, beta=0.1),
        preference.conservative(x, x, beta=0.1, label_smoothing=0.1),
        preference.robust(x, x, beta=0.1, label_smoothing=0.1),
        preference.hinge(x, x, beta=0.1),
        preference.ipo_averaged(x, x, ids, ids, beta=0.1),
        preference.sigmoid_norm(x, x, ids, ids, beta=5.0),
        preference.apo_zero(x, x, beta=0.1),
        preference.apo_down(x, x, beta=0.1),
        preference.simpo(x, x, ids, ids, beta=2.0, gamma=1.0),
        preference.orpo(x, x, ids, ids, lam=0.1),
        preference.cpo(x, x, beta=0.1, alpha=1.0),
        preference.cpo_averaged(x, x, ids, beta=0.1, alpha=1.0),
        preference.bradley_terry(x, x, margin=x, center_rewards_coef=0.01),
        preference.kto(x, mask, preference.kto_baseline(x.sum(), 6), beta=0.1),
    ],
}


def leaves(value: Any) -> Iterable[Tensor]:
    """The tensors in nested sequences and dictionaries."""
    if isinstance(value, Tensor):
        yield value
        return
    for part in value.values() if isinstance(value, dict) else value:
        yield from leaves(part)


@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_read_back_and_nothing_falls_to_float32(name: str) -> None:
    kinds = {(t.device.type, t.dtype) for t in leaves(CALLS[name]())}
    assert kinds <= {("meta", dtype) for dtype in (torch.float64, torch.bool, torch.int64)}


def test_a_read_back_would_be_seen() -> None:
    for read in (lambda: x.sum().item(), lambda: x[mask], lambda: torch.unique(ids)):
        with pytest.raises((RuntimeError, NotImplementedError)):
            read()


class FloatReads(TorchDispatchMode):
    """Counts the numbers with a fraction that Python reads: integers lay out a batch, and are read on the CPU."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default and args[0].is_floating_point()
        return func(*args, **(kwargs or {}))


def reads_of_an_update(config: GrpoConfig | PpoConfig, role: str, budget: int, worst: bool = False) -> tuple[int, int]:
    """How often `forward_backward` reads, and in how many micro-batches it runs."""
    job = job_of(config.model_copy(update={"micro_batch_tokens": budget}))
    job.publish(0)
    batch = next(iter(job.algorithm.prepare(job.algorithm.collect(0), job.models)))
    learner, loss = job.learners[role], job.algorithm.losses[role]

    class Worst:
        """The same loss, which keeps a maximum too, as a plug-in may."""

        needs = loss.needs

        def __call__(self, batch: Batch, outputs: Outputs) -> Loss:
            found = loss(batch, outputs)
            metrics = Metrics()
            metrics.peak("worst", found.total.detach())
            metrics.merge(found.metrics)
            return Loss(found.total, metrics)

    with FloatReads() as reads:
        learner.begin_step(0)
        learner.forward_backward(batch, Worst() if worst else loss)
    return reads.count, learner._micro  # type: ignore[attr-defined]


@pytest.mark.parametrize("worst", [False, True])
@pytest.mark.parametrize(("config", "role"), [(GrpoConfig(kl_coef=0.1), "policy"), (PpoConfig(), "critic")])
def test_an_update_reads_no_more_often_in_several_micro_batches(config: Any, role: str, worst: bool) -> None:
    config = config.model_copy(update={"batch_size": 4, "group_size": 4} if role == "policy" else {"batch_size": 8})
    (several, micros), (one, single) = (reads_of_an_update(config, role, budget, worst) for budget in (20, 10**6))
    assert single == 1 and micros > 2
    assert several == one > 0
