"""The losses in words and symbols, with the constants in force: what `run explain loss` prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from runner.algorithm.base import AlgorithmConfig
from runner.algorithm.config import CptConfig, DistillConfig, SftConfig
from runner.algorithm.loss_registry import resolved_options, selected_function
from runner.algorithm.policy.config import PolicyConfig
from runner.algorithm.preference.config import DpoConfig, KtoConfig, RmConfig

SUMS = "  p   the sum of log π over a completion's tokens, n their number; c the chosen completion, r the rejected one"
RATIOS = "  d   the sum of log π − log π_ref over a completion's tokens"


def likelihood(config: SftConfig | CptConfig, job: Any) -> Iterator[str]:
    """Of sft and cpt."""
    where = "the completions' tokens" if isinstance(config, SftConfig) else "every token of the text"
    if config.loss_aggregation == "seq_mean_token_mean":
        yield f"loss = −Σ_t log π(token t) / (n·N), over {where}; n = their number in the sequence of token t,"
        yield "  N = the number of sequences in the optimizer step   (loss_aggregation=seq_mean_token_mean)"
        return
    yield f"loss = −Σ_t log π(token t) / N, over {where}; N = their number in the optimizer step"


def distillation(config: DistillConfig, job: Any) -> Iterator[str]:
    """Of distill."""
    t, top = config.temperature, config.top_k
    scaled, logits = ("", "the logits") if t == 1 else (f"{t:g}²·", f"the logits / {t:g}")
    more = f" − {config.sft_coef:g}·log π(token t)" if config.sft_coef else ""
    yield (f"loss = Σ_t ({scaled}D_t{more}) / N, over the completions' tokens; N = their number in the optimizer step")
    yield from _registered_formula(config, "divergence", "D")
    yield f"  P, Q   softmax of {logits} of the teacher and of the student; KL(P ‖ Q) = Σ P·(log P − log Q)"
    if top is not None:
        yield f"      over the teacher's {top} most likely tokens and, as one event, all others   (top_k={top})"


def pairs(config: DpoConfig, job: Any) -> Iterator[str]:
    """Of dpo and its variants."""
    more = f" − {config.sft_coef:g}·p_c/n_c   (sft_coef)" if config.sft_coef else ""
    yield f"loss = mean over the pairs of the optimizer step of L{more}"
    yield from _registered_formula(config, "loss", "L")
    yield SUMS
    if config.has_reference:
        yield RATIOS


def labeled_completions(config: KtoConfig, job: Any) -> Iterator[str]:
    """Of kto."""
    beta = config.beta
    yield "loss = mean over the completions of the optimizer step of"
    yield f"  {config.desirable_weight:g}·(1 − σ({beta:g}·(d − z))) for desirable completions"
    yield f"  {config.undesirable_weight:g}·(1 − σ({beta:g}·(z − d))) for undesirable completions"
    yield RATIOS.replace("a completion's", "the completion's")
    yield "  z   KL baseline: mean of d over completions with other prompts of the mini-batch, at least 0, no gradient"


def scores(config: RmConfig, job: Any) -> Iterator[str]:
    """Of a reward model."""
    margin = " − margin" if config.use_margin else ""
    center_rewards_coef = f" + {config.center_rewards_coef:g}·(s_c + s_r)²" if config.center_rewards_coef else ""
    yield f"loss = mean over the pairs of the optimizer step of  −log σ(s_c − s_r{margin}){center_rewards_coef}"
    yield "  s   the score of the sequence, at its last token; c the chosen completion, r the rejected one"


def policy(config: PolicyConfig, job: Any) -> Iterator[str]:
    """Of grpo, ppo and opd: the whole first, then each symbol."""
    yield f"loss = Σ_t w_t · ({_loss_terms(config)})"
    yield from _registered_formula(config, "loss_aggregation", "w", {"loss_norm_length": _longest_answer(job)})
    yield from _registered_formula(config, "policy_loss", "L")
    yield f"  r   {_ratio(config)}   (importance_sampling_level={config.importance_sampling_level})"
    if config.max_log_ratio is not None:
        yield f"      log-ratios are clamped to ±{config.max_log_ratio:g}   (max_log_ratio)"
    yield f"  π_old   {_old_policy(config)}"
    yield from _advantage(config)
    if config.correction != "none":
        yield from _registered_formula(config, "correction", "c")
        level, of = config.resolved_options.correction_level, {"token": "the token", "sequence": "the whole completion"}
        yield f"      ρ = π_old / π_sampler of {of[level]}   (correction_level={level})"
    if config.has_kl:
        adapted = "" if config.kl_target is None else f", adapted towards a KL of {config.kl_target:g} per token"
        yield from _registered_formula(config, "kl_estimator", "KL")
        yield f"      d = log π − log π_ref; in the {config.resolved_options.kl_in}"
        yield f"  β   {config.resolved_options.kl_coef:g}{adapted}"
    yield from _groups(config)
    if (options := config.critic_options) is not None:
        clip = "" if options.value_clip is None else f", V clipped to ±{options.value_clip:g} around its old value"
        error = f"½(V_t − (A_t + V_t,old))²{clip}"
        if options.critic == "shared":
            yield f"  E   {error}; V from the policy's own backbone   (critic=shared)"
        else:
            yield f"critic = Σ_t w_t · {error}"


def _loss_terms(config: PolicyConfig) -> str:
    parts = "c·L" if config.correction != "none" else "L"
    if config.kl_location == "loss":
        parts += " + β·KL"
    if (options := config.critic_options) is not None and options.shared_value_coef is not None:
        parts += f" + {options.shared_value_coef:g}·E"
    return parts + (f" − {config.entropy_coef:g}·H" if config.entropy_coef else "")


def _ratio(config: PolicyConfig) -> str:
    if config.importance_sampling_level == "sequence":
        return "exp(mean over the completion's tokens of log π − log π_old), with each token's own gradient"
    return "π / π_old of the token"


def _old_policy(config: PolicyConfig) -> str:
    return {
        "sampler": f"the policy that sampled, {config.lag} step{'s' if config.lag > 1 else ''} older",
        "itself": "the policy itself: one update per step, so r = 1 and has the gradient of log π",
        "trainer": "the policy before the step's first update, computed by the trainer",
    }[config.old_logprobs_source]


def _advantage(config: PolicyConfig) -> Iterator[str]:
    penalty = " − β·KL per token" if config.kl_location == "reward" else ""
    if not config.needs_reward:
        yield "  A   log π_teacher − log π_old of the token: the negative reverse KL, estimated on what was sampled"
    elif (options := config.critic_options) is not None:
        ddof = options.whiten_ddof or 0
        white = f", whitened over the step's tokens (ddof {ddof})" if options.normalize_advantages else ""
        text = f"GAE (1506.02438) with γ = {options.gamma:g}, λ = {options.lam:g}{white}"
        yield f"  A   {text}; the reward is on the last token{penalty}"
    else:
        yield from _registered_formula(config, "advantage", "A")
        if penalty:
            yield f"      R = reward{penalty}"


def _groups(config: PolicyConfig) -> Iterator[str]:
    if config.needs_reward:
        less = ", minus the KL," if config.kl_location == "reward" else ""
        yield f"  groups whose rewards{less} are all equal are {_zero_variance_groups(config)}"
    if config.mask_truncated:
        yield "  completions truncated at max_new_tokens are masked out of the loss"


def _zero_variance_groups(config: PolicyConfig) -> str:
    what = {
        "keep": "kept",
        "drop": "dropped, but counted in w" if config.counts_dropped_groups else "dropped",
        "resample": f"replaced by new prompts, up to {config.max_rounds} rounds",
    }
    return what[config.zero_variance_policy]


def _registered_formula(
    config: AlgorithmConfig, choice: str, symbol: str, defaults: Mapping[str, str] | None = None
) -> Iterator[str]:
    """The formula of the function that an option chooses, its paper, and the options that it reads."""
    function = selected_function(config, choice)
    yield f"  {symbol.ljust(3)} {function.formula}   ({choice}={function.name}; {function.paper})"
    for name, value in resolved_options(config, choice).items():
        shown = (
            (defaults or {}).get(name, "null") if value is None else f"{value:g}" if isinstance(value, float) else value
        )
        yield f"      algorithm.{name}={shown}   {function.options[name].description}"


def _longest_answer(job: Any) -> str:
    """The default of loss_norm_length; a formula is explained without a sampler, too."""
    tokens = job.sampler.answer_tokens() * job.environment.most_turns()
    return f"{tokens:g}" if tokens else "sampler.max_new_tokens"
