"""Policy optimization written out once more: one answer at a time, in float64, of torch alone.

Nothing of the project is imported. A model is a dictionary of weights (transformers' names), a group a prompt with its
samples, an option a value of `options` under the name that a user types. Legend: an answer has L tokens after a prompt
of P; T trained tokens of an optimizer step; m the mask of trained tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = Mapping[str, Tensor]
HEADS, KV_HEADS, THETA, NORM_EPS, PAD = 4, 2, 10000.0, 1e-6, 256


@dataclass
class Sample:
    """One answer: ids and mask [L], and what is computed of it on the way; reward None = could not be scored."""

    ids: Sequence[int]
    mask: Sequence[float]
    reward: float | None
    finish: str
    channels: dict[str, Tensor] = field(default_factory=dict)
    adjusted: float = math.nan  # the reward less its KL penalty; NaN = unscored
    trained: Tensor = field(default_factory=lambda: torch.zeros(0))  # bool [L]
    dropped: bool = False
    advantages: Tensor = field(default_factory=lambda: torch.zeros(0))
    returns: Tensor = field(default_factory=lambda: torch.zeros(0))


@dataclass
class Group:
    """The samples of one prompt."""

    prompt: Sequence[int]
    samples: list[Sample]


def hidden_states(weights: Weights, ids: Sequence[int]) -> Tensor:
    """The states after the last norm, [len(ids), H], of a Qwen2 decoder."""
    w = {name.removeprefix("model."): value for name, value in weights.items()}
    x = F.embedding(torch.tensor(list(ids)), w["embed_tokens.weight"], padding_idx=PAD)  # whose row is never trained
    count, width = x.shape[0], x.shape[1] // HEADS
    angles = torch.arange(count)[:, None] * THETA ** (-torch.arange(0, width, 2) / width).double()
    cos, sin = (torch.cat([f(angles)] * 2, 1)[:, None] for f in (torch.cos, torch.sin))

    def rotate(v: Tensor) -> Tensor:
        turned = torch.cat([-v[..., width // 2 :], v[..., : width // 2]], -1)
        return v * cos + turned * sin

    def norm(v: Tensor, name: str) -> Tensor:
        return v * torch.rsqrt(v.square().mean(-1, keepdim=True) + NORM_EPS) * w[f"{name}.weight"]

    causal = torch.full((count, count), -math.inf, dtype=torch.float64).triu(1)
    for at in range(sum(name.endswith("q_proj.weight") for name in w)):
        layer = f"layers.{at}"
        y = norm(x, f"{layer}.input_layernorm")
        q, k, v = (
            F.linear(y, w[f"{layer}.self_attn.{n}_proj.weight"], w[f"{layer}.self_attn.{n}_proj.bias"]).view(
                count, -1, width
            )
            for n in "qkv"
        )
        q, k, v = rotate(q), rotate(k), v
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(width) + causal
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(count, -1)
        x = x + F.linear(mixed, w[f"{layer}.self_attn.o_proj.weight"])
        y = norm(x, f"{layer}.post_attention_layernorm")
        gate, up = (F.linear(y, w[f"{layer}.mlp.{n}_proj.weight"]) for n in ("gate", "up"))
        x = x + F.linear(F.silu(gate) * up, w[f"{layer}.mlp.down_proj.weight"])
    return norm(x, "norm")


def score(weights: Weights, prompt: Sequence[int], answer: Sequence[int], temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the answer's tokens and entropies of what predicts them, [L] each."""
    states = hidden_states(weights, [*prompt, *answer])[len(prompt) - 1 : -1]
    logs = (F.linear(states, weights["lm_head.weight"]) / temperature).log_softmax(-1)
    return logs.gather(1, torch.tensor(list(answer))[:, None])[:, 0], -(logs.exp() * logs).sum(1)


def values_of(weights: Weights, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
    """V of the state before each of the answer's tokens, [L]."""
    return F.linear(hidden_states(weights, [*prompt, *answer]), weights["score.weight"])[len(prompt) - 1 : -1, 0]


def clamped(log_ratio: Tensor, options: Mapping[str, Any]) -> Tensor:
    limit = options["max_log_ratio"]
    return log_ratio if limit is None else log_ratio.clamp(-limit, limit)


def kl_estimate(new: Tensor, reference: Tensor, ratio: Tensor, options: Mapping[str, Any]) -> Tensor:
    d = new - reference
    bounded = clamped(d, options)
    k3 = torch.exp(-bounded) - 1 + bounded
    return {
        "k1": d,
        "k2": d**2 / 2,
        "k3": k3,
        "k3_ratio": (ratio * k3).detach() + ratio.detach() * (d**2 / 2 - (d**2 / 2).detach()),
        "k3_plus": k3.detach() + d**2 / 2 - (d**2 / 2).detach(),
    }[options["kl_estimator"]]


def has_kl(options: Mapping[str, Any]) -> bool:
    return options["kl_estimator"] != "none" and options["kl_coef"] > 0


def old_from(options: Mapping[str, Any]) -> str:
    """Whose log-probabilities the ratio is taken to: the trainer's, the sampler's, or the policy's own."""
    if options["correction"] != "none":
        return "trainer"
    if options["lag"]:
        return "sampler"
    several = options["epochs"] * options["mini_batches"] > 1
    return "trainer" if several or (has_kl(options) and options["kl_in"] == "reward") else "itself"


def as_stored(values: Tensor) -> Tensor:
    """Log-probabilities as a job stores them: a difference of two in a reward may be divided by a small spread."""
    return values.float().double()


def prepare(
    groups: Sequence[Group], policy: Weights, sampled: Weights, others: Mapping[str, Weights], options: Any
) -> None:
    """Fill in what is fixed before a step's first update. sampled: the weights that drew the answers."""
    with torch.no_grad():
        for group in groups:
            for one in group.samples:
                row = (group.prompt, one.ids)
                one.channels["sampled"] = score(sampled, *row, options["temperature"])[0]
                source = {"trainer": policy, "sampler": sampled, "itself": policy}[old_from(options)]
                one.channels["old"] = as_stored(score(source, *row, options["temperature"])[0])
                if has_kl(options):
                    one.channels["reference"] = as_stored(score(others["reference"], *row, options["temperature"])[0])
                if options["name"] == "ppo":
                    one.channels["values"] = values_of(others["critic"], *row)
        mark_trained(groups, options)
        samples = [one for group in groups for one in group.samples]
        for one in samples:
            one.advantages = torch.zeros(len(one.ids), dtype=torch.float64)
        if options["name"] == "ppo":
            add_gae(samples, options)
        else:
            add_advantages([group for group in groups if in_statistics(group, options)], options)


def mark_trained(groups: Sequence[Group], options: Mapping[str, Any]) -> None:
    """Rewards less their KL penalty, and which tokens are trained."""
    for one in (one for group in groups for one in group.samples):
        out = one.reward is None or (options["mask_truncated"] and one.finish == "length")
        one.trained = torch.tensor([bool(m) and not out for m in one.mask])
        one.channels["penalty"] = torch.zeros(len(one.ids), dtype=torch.float64)
        if has_kl(options) and options["kl_in"] == "reward":
            estimate = kl_estimate(one.channels["old"], one.channels["reference"], torch.ones(()), options)
            one.channels["penalty"] = options["kl_coef"] * estimate * torch.tensor(one.mask)
        one.adjusted = math.nan if one.reward is None else one.reward - float(one.channels["penalty"].sum())
    if options.get("zero_variance", "keep") != "keep":
        for group in groups:
            scored = {one.adjusted for one in group.samples if not math.isnan(one.adjusted)}
            for one in group.samples:
                one.dropped = len(scored) < 2
        if all(one.dropped for group in groups for one in group.samples) or not options["count_dropped_groups"]:
            for one in (one for group in groups for one in group.samples if one.dropped):
                one.trained = torch.zeros_like(one.trained)


def in_statistics(group: Group, options: Mapping[str, Any]) -> bool:
    return not group.samples[0].dropped or bool(options["count_dropped_groups"])


def whiten(samples: Sequence[Sample], ddof: int) -> None:
    flat = torch.cat([torch.zeros(0), *(one.advantages[one.trained] for one in samples)])
    if not len(flat):
        return
    mean = flat.mean()
    variance = (flat - mean).square().sum() / max(len(flat) - ddof, 1)
    for one in samples:
        one.advantages = (one.advantages - mean) / (variance + 1e-8).sqrt() * one.trained


def add_advantages(groups: Sequence[Group], options: Mapping[str, Any]) -> None:
    name, samples = options["advantage"], [one for group in groups for one in group.samples]
    scored = torch.tensor([one.adjusted for one in samples if not math.isnan(one.adjusted)], dtype=torch.float64)
    for group in groups:
        r = torch.tensor([one.adjusted for one in group.samples], dtype=torch.float64)
        known = r[~r.isnan()]
        n, mean = len(known), known.mean()
        std = known.std() if n > 1 else torch.zeros(())
        lengths = torch.tensor([sum(one.mask) for one in group.samples], dtype=torch.float64)[~r.isnan()]
        for one in group.samples:
            if math.isnan(one.adjusted):
                continue
            a = one.adjusted - mean
            if name == "group_mean_std":
                a = a / (std + options["advantage_eps"]) if std > 0 else a * 0
            elif name == "batch_std":
                spread = scored.std() if len(scored) > 1 else torch.zeros(())
                a = a / (spread + options["advantage_eps"]) if spread > 0 else a * 0
            elif name == "leave_one_out":
                a = a * n / max(n - 1, 1)
            elif name == "opo" and lengths.sum() > 0:
                a = one.adjusted - (lengths * known).sum() / lengths.sum()
            elif name == "none":
                a = torch.tensor(one.adjusted, dtype=torch.float64)
            one.advantages = torch.full((len(one.ids),), float(a), dtype=torch.float64)
    if name == "reinforce_pp":
        for one in samples:
            one.advantages = discounted(token_rewards(one), one.trained, options["gamma"])
    if name.startswith("reinforce_pp"):
        whiten(samples, options["whiten_ddof"])


def token_rewards(one: Sample) -> Tensor:
    """The reward on the last trained token, less the penalty of each, [L]."""
    rewards = -one.channels["penalty"]
    places = one.trained.nonzero()[:, 0]
    if len(places):
        rewards[places[-1]] += one.reward
    return rewards


def discounted(rewards: Tensor, trained: Tensor, gamma: float) -> Tensor:
    total, found = 0.0, torch.zeros_like(rewards)
    for at in reversed(trained.nonzero()[:, 0].tolist()):
        total = float(rewards[at]) + gamma * total
        found[at] = total
    return found


def add_gae(samples: Sequence[Sample], options: Mapping[str, Any]) -> None:
    for one in samples:
        rewards, values = token_rewards(one), one.channels["values"]
        following, carried = 0.0, 0.0
        for at in reversed(one.trained.nonzero()[:, 0].tolist()):
            delta = float(rewards[at]) + options["gamma"] * following - float(values[at])
            carried = delta + options["gamma"] * options["lam"] * carried
            one.advantages[at], following = carried, float(values[at])
        one.returns = one.advantages + values
    if options["normalize_advantages"]:
        whiten(samples, options["whiten_ddof"])


def correction_weights(one: Sample, options: Mapping[str, Any]) -> Tensor:
    difference = (one.channels["old"] - one.channels["sampled"]) * one.trained
    if options["correction_level"] == "sequence":
        difference = difference.sum().expand(len(one.ids))
    rho = clamped(difference, options).exp()
    if options["correction"] == "tis":
        return rho.clamp(max=options["correction_max"])
    low = options["correction_min"] if options["correction"] == "mis" else 0.0
    return torch.where((rho < low) | (rho > options["correction_max"]), 0.0, rho)


def policy_loss(one: Sample, new: Tensor, ratio: Tensor, options: Mapping[str, Any]) -> Tensor:
    a, name = one.advantages, options["policy_loss"]
    if name == "reinforce":
        return -a * new
    if name == "sapo":
        tau = torch.where(a > 0, options["tau_positive"], options["tau_negative"])
        return -a * 4 / tau * torch.sigmoid(tau * (ratio - 1))
    kept = ratio.clamp(1 - options["clip_low"], 1 + options["clip_high"])
    if name == "cispo":
        return -kept.detach() * a * new
    loss = torch.maximum(-ratio * a, -kept * a)
    bound = options["dual_clip"]
    return loss if bound is None else torch.where(a < 0, torch.minimum(loss, -bound * a), loss)


def aggregation_weights(groups: Sequence[Group], options: Mapping[str, Any]) -> list[Tensor]:
    """The weight of each token of each sample, in their order; denominators count this optimizer step."""
    samples = [one for group in groups for one in group.samples]
    sizes = [int(one.trained.sum()) for one in samples]
    of_prompt = [sum(int(one.trained.sum()) for one in group.samples) for group in groups for _ in group.samples]
    tokens, rows = max(sum(sizes), 1), max(sum(size > 0 for size in sizes), 1)
    prompts = max(sum(any(one.trained.any() for one in group.samples) for group in groups), 1)
    found = []
    for one, size, together in zip(samples, sizes, of_prompt, strict=True):
        each = {
            "token_mean": 1 / tokens,
            "seq_mean_token_mean": 1 / (max(size, 1) * rows),
            "seq_mean_token_sum": 1 / rows,
            "seq_mean_token_sum_norm": 1 / (rows * options["loss_norm_length"]),
            "prompt_mean": 1 / (max(together, 1) * prompts),
        }[options["loss_aggregation"]]
        found.append(each * one.trained * (not one.dropped))
    return found


def losses(
    groups: Sequence[Group], policy: Weights, critic: Weights | None, options: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """The policy's and the critic's loss of one optimizer step over these groups."""
    total, error = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    weights = iter(aggregation_weights(groups, options))
    for group in groups:
        for one in group.samples:
            weight = next(weights)
            new, entropy = score(policy, group.prompt, one.ids, options["temperature"])
            old = new.detach() if old_from(options) == "itself" else one.channels["old"]
            token_ratio = ratio = clamped(new - old, options).exp()
            if options["importance_sampling_level"] == "sequence":
                mean = ((new - old).detach() * one.trained).sum() / max(int(one.trained.sum()), 1)
                ratio = clamped(mean + new - new.detach(), options).exp()
            loss = policy_loss(one, new, ratio, options)
            if options["correction"] != "none":
                loss = loss * correction_weights(one, options)
            if has_kl(options) and options["kl_in"] == "loss":
                loss = loss + options["kl_coef"] * kl_estimate(new, one.channels["reference"], token_ratio, options)
            total = total + (weight * (loss - options["entropy_coef"] * entropy)).sum()
            if critic is not None:
                v, before, back = values_of(critic, group.prompt, one.ids), one.channels["values"], one.returns
                worst = (v - back) ** 2
                if (clip := options["value_clip"]) is not None:
                    worst = torch.maximum(worst, (before + (v - before).clamp(-clip, clip) - back) ** 2)
                error = error + (weight * worst / 2).sum()
    return total, error
