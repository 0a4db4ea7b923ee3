"""The losses of policy optimization as the learner takes them: policy loss and value loss.

    token channels   weight (aggregation with its global denominator, 0 where nothing is trained), sampled,
                     advantages, or teacher alone
    where needed     old, reference, teacher, importance;  for the critic: values, returns

    separate   policy ◀── surrogate      critic ◀── value error
    shared     policy ◀── surrogate + value_coef · value error

Legend: T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from runner.algorithm.kl_divergence import k1, k3
from runner.algorithm.loss_registry import compute_selected
from runner.algorithm.policy import losses as policy_losses
from runner.algorithm.policy.config import PolicyConfig
from runner.algorithm.policy.importance import sampler_mismatch, sequence_ratio, token_ratio
from runner.core.batch import Batch, row_of_tokens, unit_spans
from runner.core.metrics import Metrics
from runner.interfaces import Loss, LossFn, Outputs, Role

CLIPPED = ("clip_frac_low", "clip_frac_high", "clip_frac_dual")  # metrics that every policy loss has


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Σ weight·(importance·surrogate + kl_coef·KL − entropy_coef·H).

    Without the channel `old` the policy has not moved since it sampled: the ratio is 1 and has the policy's gradient,
    and a teacher's advantages are made here, of the policy's own log-probabilities.
    """

    config: PolicyConfig
    kl_coef: Callable[[], float]
    needs: frozenset[str] = frozenset({"logprobs", "entropy"})

    def __call__(self, batch: Batch, outputs: Outputs) -> Loss:
        tokens, mask = batch.tokens, batch.tokens["weight"] != 0
        logprobs, entropy = outputs["logprobs"], outputs["entropy"]
        old = tokens.get("old", logprobs.detach())
        ratio = self._ratio(batch, logprobs, old, mask)
        advantages = tokens["advantages"] if "advantages" in tokens else teacher_log_ratio(tokens["teacher"], old)
        loss, found = self._surrogate(batch, logprobs, old, ratio, advantages, mask)
        if "importance" in tokens:
            loss = loss * tokens["importance"]
        if self.config.kl_location == "loss":
            loss = loss + self.kl_coef() * self._kl(logprobs, tokens["reference"], old, mask)
        if self.config.entropy_coef:
            loss = loss + policy_losses.entropy_bonus(entropy, self.config.entropy_coef)
        total = torch.where(mask, tokens["weight"] * loss, 0).sum()
        diagnostics = {"entropy": entropy, "ratio": ratio, **found}
        return Loss(total, self._metrics(batch, total, mask, diagnostics, logprobs, old))

    def _ratio(self, batch: Batch, logprobs: Tensor, old: Tensor, mask: Tensor) -> Tensor:
        if self.config.importance_sampling_level == "sequence":
            return sequence_ratio(logprobs, old, mask, row_of_tokens(batch), self.config.max_log_ratio)
        return token_ratio(logprobs, old, self.config.max_log_ratio)

    def _surrogate(
        self, batch: Batch, logprobs: Tensor, old: Tensor, ratio: Tensor, advantages: Tensor, mask: Tensor
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        offered = {
            "ratio": lambda: ratio,
            "logprobs": lambda: logprobs,
            "old_logprobs": lambda: old,
            "advantages": lambda: advantages,
            "mask": lambda: mask,
            "row": lambda: row_of_tokens(batch),
        }
        loss, found = compute_selected(self.config, "policy_loss", offered)
        return loss, dict.fromkeys(CLIPPED, torch.zeros_like(mask)) | found

    def _kl(self, logprobs: Tensor, reference: Tensor, old: Tensor, mask: Tensor) -> Tensor:
        offered = {
            "logprobs": lambda: logprobs,
            "reference_logprobs": lambda: reference,
            "ratio": lambda: token_ratio(logprobs, old, self.config.max_log_ratio),
            "max_log_ratio": lambda: self.config.max_log_ratio,
            "mask": lambda: mask,
        }
        return compute_selected(self.config, "kl_estimator", offered)

    def _metrics(
        self,
        batch: Batch,
        total: Tensor,
        mask: Tensor,
        diagnostics: Mapping[str, Tensor],
        logprobs: Tensor,
        old: Tensor,
    ) -> Metrics:
        metrics, count = Metrics(), mask.sum()
        metrics.add("train/loss", total.detach(), _share(batch))

        def mean(name: str, values: Tensor) -> None:
            values = values.to(total.dtype) if values.dtype == torch.bool else values.detach()
            metrics.add(name, torch.where(mask, values, 0).sum(), count)

        for name, values in diagnostics.items():
            mean(f"policy/{name}", values)
        # where `old` is the sampler's own, only this pass says what the trainer computes
        own = logprobs.detach() if self.config.old_logprobs_source == "sampler" else old
        for name, (value, number) in sampler_mismatch(own, batch.tokens["sampled"], mask).items():
            metrics.add(f"mismatch/{name}", value, number)
        if "reference" in batch.tokens:
            mean("policy/kl", k3(old, batch.tokens["reference"], self.config.max_log_ratio))
        if "teacher" in batch.tokens:
            mean("distill/reverse_kl", k1(old, batch.tokens["teacher"]))
        return metrics


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """Σ weight·½(V − return)², clipped around the values before the update."""

    clip: float | None
    needs: frozenset[str] = frozenset({"values"})

    def __call__(self, batch: Batch, outputs: Outputs) -> Loss:
        tokens, mask = batch.tokens, batch.tokens["weight"] != 0
        loss, found = policy_losses.clipped_value_loss(
            outputs["values"], tokens["values"], tokens["returns"], clip=self.clip
        )
        total = torch.where(mask, tokens["weight"] * loss, 0).sum()
        metrics, count = Metrics(), mask.sum()
        metrics.add("critic/loss", total.detach(), _share(batch))
        metrics.add("critic/clip_frac", (found["clipped"] & mask).sum(), count)
        metrics.add("critic/value", torch.where(mask, outputs["values"].detach(), 0).sum(), count)
        metrics.add("critic/return", torch.where(mask, tokens["returns"], 0).sum(), count)
        return Loss(total, metrics)


@dataclass(frozen=True, slots=True)
class PolicyValueLoss:
    """policy + coefficient · value, of one model that gives log-probabilities and values in one pass.

    The metrics are those of the two: `train/loss` is the policy's part, `critic/loss` the value error before it is
    weighed.
    """

    policy: PolicyLoss
    value: ValueLoss
    coefficient: float

    @property
    def needs(self) -> frozenset[str]:
        """What both read."""
        return self.policy.needs | self.value.needs

    def __call__(self, batch: Batch, outputs: Outputs) -> Loss:
        policy, value = self.policy(batch, outputs), self.value(batch, outputs)
        policy.metrics.merge(value.metrics)
        return Loss(policy.total + self.coefficient * value.total, policy.metrics)


def _share(batch: Batch) -> float:
    """The part that this is of its mini-batch, by units, trained on or not.

    So the parts of a mini-batch add up to its loss, and several mini-batches to their mean.
    """
    return len(unit_spans(batch)) / batch.totals["units"]


def teacher_log_ratio(teacher: Tensor, student: Tensor) -> Tensor:
    """log p_teacher − log p_student, [T], without gradient: the reward of on-policy distillation."""
    return teacher - student.detach()


def losses_by_role(config: PolicyConfig, kl_coef: Callable[[], float]) -> Mapping[Role, LossFn]:
    """The losses by role; one for policy and critic together where they share their backbone."""
    policy, options = PolicyLoss(config, kl_coef), config.critic_options
    if options is None:
        return {"policy": policy}
    value = ValueLoss(options.value_clip)
    if options.shared_value_coef is not None:
        return {"policy": PolicyValueLoss(policy, value, options.shared_value_coef)}
    return {"policy": policy, "critic": value}
