"""The loss of policy optimisation in words and symbols, with the constants in force: what `run explain loss` prints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from runner.algorithm.policy.base import PolicyConfig
from runner.algorithm.policy.worth import FromCritic, FromRewards, FromTeacher

AGGREGATIONS = {
    "token_mean": "1 / (learnt tokens of the step)",
    "seq_mean_token_mean": "1 / (learnt tokens of the answer × answers of the step)",
    "seq_mean_token_sum": "1 / (answers of the step)",
    "seq_mean_token_sum_norm": "1 / (answers of the step × {length})",
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
    tokens = config.longest_answer(job.sampler.answer_tokens(), job.environment.most_turns())
    length = f"{tokens:g}" if tokens else "sampler.max_new_tokens"  # a formula is explained without a sampler, too
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
    if (critic := config.critic_wanted) is not None:
        clip = "" if critic.clip is None else f", V kept within ±{critic.clip:g} of its old value"
        error = f"½(V_t − (A_t + V_t,old))²{clip}"
        if critic.role == "policy":
            yield f"  E   {error}; V from the policy's own backbone   (critic=shared)"
        else:
            yield f"critic = Σ_t w_t · {error}"


def _whole(config: PolicyConfig) -> str:
    parts = "−c·J" if config.correction != "none" else "−J"
    if config.kl_in == "loss":
        parts += " + β·KL"
    if (critic := config.critic_wanted) is not None and critic.coefficient is not None:
        parts += f" + {critic.coefficient:g}·E"
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
    return {
        "sampler": f"the policy that sampled, {config.lag} step{'s' if config.lag > 1 else ''} older",
        "itself": "the policy itself: one update per step, so r = 1 and has the gradient of log π",
        "trainer": "the policy before the step's first update, computed by the trainer",
    }[config.old_from]


def _advantage(config: PolicyConfig) -> str:
    penalty = " − β·KL per token" if config.kl_in == "reward" else ""
    match config.worth:
        case FromCritic() as critic:
            white = ", whitened over the step's tokens" if critic.whiten else ""
            text = f"GAE with γ = {critic.gamma:g}, λ = {critic.lam:g}{white}"
            return f"{text}; the reward stands on the last token{penalty}"
        case FromTeacher():
            return "log π_teacher − log π_old of the token: the negative reverse KL, estimated on what was sampled"
        case FromRewards(name, gamma):
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
        "resample": f"replaced by new prompts, up to {config.most_rounds} rounds",
    }
    return what[config.equal_rewards]
