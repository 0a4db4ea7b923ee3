"""The loss of policy optimisation in words and symbols, with the constants in force: what `run explain loss` prints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from runner.algorithm.distillation.config import OpdConfig
from runner.algorithm.policy.config import PolicyConfig, PpoConfig

AGGREGATIONS = {
    "token_mean": "1 / (learnt tokens of the step)",
    "seq_mean_token_mean": "1 / (learnt tokens of the answer × answers of the step)",
    "seq_mean_token_sum": "1 / (answers of the step)",
    "seq_mean_token_sum_norm": "1 / (answers of the step × {length:g})",
    "prompt_mean": "1 / (learnt tokens of the prompt's answers × prompts of the step)",
}
ADVANTAGES = {
    "group_mean_std": "(R − mean of the group) / (standard deviation of the group + 1e-06)",
    "group_mean": "R − mean of the group",
    "leave_one_out": "R − mean of the group's other answers",
    "batch_std": "(R − mean of the group) / (standard deviation of the step + 1e-06)",
    "opo": "R − length-weighted mean of the group",
    "none": "R",
    "reinforce_pp": "whitened Σ_k γ^k r_(t+k), γ = {gamma:g}; r = R on the last token",
    "reinforce_pp_baseline": "(R − mean of the group), whitened over the step's tokens",
}
KLS = {
    "k1": "d",
    "k2": "d²/2",
    "k3": "exp(−d) − 1 + d",
    "k3_ratio": "r·(exp(−d) − 1 + d)",
    "k3_plus": "exp(−d) − 1 + d, with the gradient of d²/2",
}
CORRECTIONS = {
    "tis": "min(ρ, {high:g})",
    "mis": "ρ where {low:g} ≤ ρ ≤ {high:g}, else 0",
    "decoupled": "ρ{cap}",
}


def formula(config: PolicyConfig, job: Any) -> Iterator[str]:
    """Lines, the whole first, then each symbol."""
    yield f"loss = Σ_t w_t · ({_whole(config)})"
    length = config.aggregation_length or getattr(job.sampler, "max_new_tokens", 0)
    yield f"  w   {AGGREGATIONS[config.aggregation].format(length=length)}   (aggregation={config.aggregation})"
    yield f"  J   {_surrogate(config)}   (objective={config.objective})"
    yield f"  r   {_ratio(config)}   (ratio={config.ratio})"
    yield f"  π_old   {_old(config)}"
    yield f"  A   {_advantage(config)}"
    if config.correction != "none":
        yield f"  c   {_correction(config)}   (correction={config.correction})"
    if config.kl != "none":
        adapted = "" if config.kl_target is None else f", adapted towards a KL of {config.kl_target:g} per token"
        yield f"  KL  {KLS[config.kl]}, d = log π − log π_ref; in the {config.in_force.kl_place}   (kl={config.kl})"
        yield f"  β   {config.in_force.kl_coef:g}{adapted}"
    yield from _groups(config)
    if isinstance(config, PpoConfig):
        clip = "" if config.value_clip is None else f", V kept within ±{config.value_clip:g} of its old value"
        error = f"½(V_t − (A_t + V_t,old))²{clip}"
        if config.critic == "shared":
            yield f"  E   {error}; V from the policy's own backbone   (critic=shared)"
        else:
            yield f"critic = Σ_t w_t · {error}"


def _whole(config: PolicyConfig) -> str:
    parts = "−c·J" if config.correction != "none" else "−J"
    if config.kl != "none" and config.in_force.kl_place == "loss":
        parts += " + β·KL"
    if isinstance(config, PpoConfig) and config.critic == "shared":
        parts += f" + {config.shared_value_coef:g}·E"
    return parts + (f" − {config.entropy_coef:g}·H" if config.entropy_coef else "")


def _surrogate(config: PolicyConfig) -> str:
    low, high = config.in_force.clip_low, config.in_force.clip_high
    if config.objective == "reinforce":
        return "A·log π"
    if config.objective == "sapo":
        up, down = config.in_force.tau_positive, config.in_force.tau_negative
        return f"A·(4/τ)·sigmoid(τ·(r − 1)), τ = {up:g} where A > 0, else {down:g}"
    if config.objective == "cispo":
        return f"sg(clip(r, {1 - low:g}, {1 + high:g}))·A·log π"
    dual = "" if config.dual_clip is None else f"; where A < 0 at least {config.dual_clip:g}·A"
    return f"min(r·A, clip(r, {1 - low:g}, {1 + high:g})·A){dual}"


def _ratio(config: PolicyConfig) -> str:
    if config.ratio == "sequence":
        return "exp(mean over the answer's tokens of log π − log π_old), with each token's own gradient"
    return "π / π_old of the token"


def _old(config: PolicyConfig) -> str:
    if config.lag and config.correction == "none":
        return f"the policy that sampled, {config.lag} step{'s' if config.lag > 1 else ''} older"
    if config.rewarded and config.correction == "none" and config.epochs * config.mini_batches == 1:
        return "the policy itself: one update per step, so r = 1 and has the gradient of log π"
    return "the policy before the step's first update, computed by the trainer"


def _advantage(config: PolicyConfig) -> str:
    penalty = " − β·KL per token" if config.kl != "none" and config.in_force.kl_place == "reward" else ""
    if isinstance(config, PpoConfig):
        white = ", whitened over the step's tokens" if config.whiten else ""
        text = f"GAE with γ = {config.gamma:g}, λ = {config.lam:g}{white}"
        return f"{text}; the reward stands on the last token{penalty}"
    if isinstance(config, OpdConfig):
        return "log π_teacher − log π_old of the token: the negative reverse KL, estimated on what was sampled"
    gamma = getattr(config, "gamma", None) or 1.0
    name = config.advantage  # type: ignore[attr-defined]
    return f"{ADVANTAGES[name].format(gamma=gamma)}{penalty}   (advantage={name})"


def _correction(config: PolicyConfig) -> str:
    high, low = config.in_force.correction_high, config.in_force.correction_low
    cap = "" if high is None else f" up to {high:g}, 0 above"
    level = config.in_force.correction_level
    rho = "of the token" if level == "token" else "of the whole answer"
    text = CORRECTIONS[config.correction].format(low=low, high=high or 0, cap=cap)
    return f"{text}; ρ = π_old / π_sampler {rho}"


def _groups(config: PolicyConfig) -> Iterator[str]:
    if config.rewarded:
        yield f"  groups whose rewards are all equal are {_equal(config)}"
    if config.overlong == "mask":
        yield "  answers cut off at max_new_tokens are left out of the loss"


def _equal(config: PolicyConfig) -> str:
    what = {
        "keep": "kept",
        "drop": "left out",
        "resample": f"replaced by new prompts, up to {config.in_force.resample_rounds} rounds",
    }
    return what[config.zero_variance]
