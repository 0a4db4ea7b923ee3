"""What a user can set of policy optimization: grpo, ppo, opd, and by presets their variants.

The knobs are orthogonal. One that a combination does not use has no value (null), and setting it is an error; null
stands for the default that its description names. Losses, advantages, KL estimators, aggregations and corrections are
registered functions (`runner.interfaces.losses`), which bring their own options.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

from pydantic import Field

from runner.algorithm.base import FrozenModelSpec, OldLogprobsSource, ReferenceBasedConfig, TeacherBasedConfig
from runner.algorithm.loss_registry import RegisteredFunction, functions, selected_function, with_options
from runner.spec.base import Head, ItemKind

KL_OPTIONS = ("kl_coef", "kl_in", "kl_target", "reference")
T = TypeVar("T")


def value_or_default(value: T | None, default: T) -> T:
    """An option's value, or what stands for null."""
    return default if value is None else value


class ResolvedOptions(NamedTuple):
    """Options that may be null, with their defaults filled in."""

    kl_coef: float
    kl_in: Literal["loss", "reward"]
    correction_level: Literal["token", "sequence"]


@with_options
class PolicyConfig(ReferenceBasedConfig):
    """Sampled answers, a reward, and a surrogate loss of their log-probabilities."""

    default_kl_location: ClassVar[Literal["loss", "reward"]] = "loss"
    item_kind: ClassVar[ItemKind] = "prompts"
    needs_sampler: ClassVar[bool] = True
    needs_reward: ClassVar[bool] = True
    explain_fn: ClassVar[str | None] = "runner.algorithm.explain:policy"
    group_size: int = Field(default=8, ge=1, description="Completions sampled per prompt.")
    epochs: int = Field(default=1, ge=1, description="Epochs over the samples of one step.")
    share_prompts: bool = Field(
        default=True, description="Compute the prompt of a group once in training; changes speed, not the numbers."
    )
    policy_loss: Annotated[str, RegisteredFunction("policy_loss")] = Field(
        default="clip", description="Policy loss per token."
    )
    importance_sampling_level: Literal["token", "sequence"] = Field(
        default="token", description="Level of the importance ratio; sequence = GSPO's mean over the tokens."
    )
    loss_aggregation: Annotated[str, RegisteredFunction("aggregation")] = Field(
        default="token_mean",
        description="Aggregation of token losses; its denominators count the whole mini-batch, on all ranks.",
    )
    kl_estimator: Annotated[str, RegisteredFunction("kl_estimator", others=("none",))] = Field(
        default="none", description="Estimator of the KL divergence from the reference; none = no reference model."
    )
    kl_in: Literal["loss", "reward"] | None = Field(
        default=None, description="Where the KL penalty is added; null = loss for grpo, reward for ppo."
    )
    kl_coef: float | None = Field(
        default=None, ge=0, description="Weight of the KL penalty; 0 = no reference model; null = 0.001."
    )
    kl_target: float | None = Field(
        default=None, gt=0, description="Adapt kl_coef towards this KL per token (Ziegler et al., 2019); null = fixed."
    )
    reference: Literal["adapter", "copy"] | None = Field(
        default=None,
        description="Reference model: adapter = the policy with its adapter disabled; copy = a frozen copy. null = "
        "adapter where this job adds a new adapter, else copy.",
    )
    max_log_ratio: float | None = Field(
        default=20.0,
        gt=0,
        description="Clamp of log-ratios (policy, correction, KL estimator): 20 as in verl; null = none, as in TRL.",
    )
    entropy_coef: float = Field(default=0.0, description="Weight of the entropy bonus.")
    mask_truncated: bool = Field(
        default=False, description="Mask completions that were truncated at max_new_tokens out of the loss."
    )
    lag: int = Field(default=0, ge=0, description="Steps that sampling runs ahead of training; 0 = strictly on-policy.")
    correction: Annotated[str, RegisteredFunction("correction", others=("none",))] = Field(
        default="none",
        description="Importance weights against the mismatch of sampler and trainer; lag above 1 needs decoupled.",
    )
    correction_level: Literal["token", "sequence"] | None = Field(
        default=None, description="Level of the correction weights; null = token."
    )
    max_logprob_diff: float | None = Field(
        default=None,
        gt=0,
        description="Stop if sampler and trainer differ by more than this at lag 0 (mean |log-prob.|); null = never.",
    )

    @property
    def samples_per_prompt(self) -> int:
        return self.group_size

    def frozen_models(self) -> Mapping[str, FrozenModelSpec]:
        return {"reference": self.reference_model(self.reference)} if self.has_kl else {}

    def steps_ahead(self) -> int:
        return self.lag

    def needs_sampler_logprobs(self) -> bool:
        return self.old_logprobs_source == "sampler" or self.correction != "none" or self.max_logprob_diff is not None

    @property
    def critic_options(self) -> "PpoConfig | None":
        """The options of generalized advantages and of the critic that they need; None = no critic."""
        return None

    @property
    def zero_variance_policy(self) -> Literal["drop", "keep", "resample"]:
        """What becomes of groups whose rewards are all equal."""
        return "keep"

    @property
    def counts_dropped_groups(self) -> bool:
        """Whether groups that are dropped stay in the denominators."""
        return False

    @property
    def max_rounds(self) -> int:
        """Most rounds of prompts per step."""
        return 1

    @property
    def has_kl(self) -> bool:
        """Whether there is a KL penalty, and so a reference model; kl_coef=0 is none."""
        return self.kl_estimator != "none" and self.resolved_options.kl_coef > 0

    @property
    def kl_location(self) -> Literal["loss", "reward"] | None:
        """Where a KL penalty goes; None = there is none."""
        return self.resolved_options.kl_in if self.has_kl else None

    @property
    def old_logprobs_source(self) -> OldLogprobsSource:
        """Whose log-probabilities stand for the policy that the ratio is taken to.

        itself: there is one update per step, so the policy has not moved and the ratio is 1; sampler: what it
        reported; trainer: a pass before the step's first update
        """
        if self.correction != "none":
            return "trainer"
        if self.lag:
            return "sampler"
        return "trainer" if self.epochs * self.mini_batches > 1 or self.kl_location == "reward" else "itself"

    @property
    def has_importance_ratio(self) -> bool:
        """Whether the policy loss reads how far the policy has moved since it sampled."""
        return not {"ratio", "old_logprobs"}.isdisjoint(selected_function(self, "policy_loss").inputs)

    @property
    def resolved_options(self) -> ResolvedOptions:
        """The values of the options that may be null, as they are used."""
        return ResolvedOptions(
            kl_coef=value_or_default(self.kl_coef, 0.001),
            kl_in=value_or_default(self.kl_in, self.default_kl_location),
            correction_level=value_or_default(self.correction_level, "token"),
        )

    def problems(self, job: Any) -> list[tuple[str, str]]:
        return [*super().problems(job), *self._unused_options(), *self._contradictions(job)]

    def _unused_options(self) -> list[tuple[str, str]]:
        """Options that were set although the choice they belong to was not made."""
        uses = {option: ("kl_estimator", tuple(functions("kl_estimator"))) for option in KL_OPTIONS}
        uses["correction_level"] = ("correction", tuple(functions("correction")))
        return [
            (
                f"algorithm.{option}",
                f"not used with {decider}={getattr(self, decider)}; it belongs to {decider}={'|'.join(choices)}",
            )
            for option, (decider, choices) in uses.items()
            if getattr(self, option) is not None and getattr(self, decider) not in choices
        ]

    def _contradictions(self, job: Any) -> list[tuple[str, str]]:
        found = []
        for_stale = [name for name, one in functions("correction").items() if one.for_stale]
        if self.lag > 1 and self.correction not in for_stale:
            why = "samples are several updates old, which the clipped ratio alone does not correct"
            found.append(("algorithm.lag", f"{self.lag} needs algorithm.correction={'|'.join(for_stale)}: {why}"))
        elif self.lag and self.correction == "none" and not self.has_importance_ratio:
            why = (
                f"policy_loss={self.policy_loss} has no importance ratio, so nothing corrects samples of older weights"
            )
            found.append(("algorithm.lag", f"{why}; type algorithm.correction=tis, or algorithm.policy_loss=clip"))
        if self.kl_target is not None and self.resolved_options.kl_coef == 0:
            found.append(("algorithm.kl_target", "an adaptive coefficient cannot start at kl_coef=0"))
        kl_in = None if self.kl_estimator == "none" else selected_function(self, "kl_estimator").kl_in
        if kl_in not in (None, self.resolved_options.kl_in):
            why, other = "in the reward only k1 is unbiased", "k1"
            if kl_in == "reward":
                why, other = f"{self.kl_estimator} has no gradient in expectation as a loss", "k3"
            text = f"{why}; type algorithm.kl_estimator={other}, or kl_in={kl_in} for {self.kl_estimator}"
            found.append(("algorithm.kl_estimator", text))
        if self.kl_coef == 0 and self.reference is not None:
            found.append(("algorithm.reference", "kl_coef=0 loads no reference model; leave it out, or raise kl_coef"))
        found += self.reference_problems(self.reference, job)
        if self.importance_sampling_level == "sequence" and self.loss_aggregation != "seq_mean_token_mean":
            text = f"importance_sampling_level=sequence needs seq_mean_token_mean, not {self.loss_aggregation}"
            found.append(("algorithm.loss_aggregation", text))
        if self.max_logprob_diff is not None and self.lag:
            found.append(("algorithm.max_logprob_diff", f"at lag={self.lag} the two differ by design; use it at lag=0"))
        return found


@with_options
class GrpoConfig(PolicyConfig):
    """Group-relative policy optimization (2402.03300) and its variants, without a critic."""

    factory: ClassVar[str] = "runner.algorithm.policy.policy_gradient:build"
    name: Literal["grpo"] = "grpo"
    advantage: Annotated[str, RegisteredFunction("advantage")] = Field(
        default="group_mean_std", description="Advantage estimator: the baseline of a reward, and its scale."
    )
    zero_variance: Literal["drop", "keep", "resample"] = Field(
        default="drop",
        description="Groups whose rewards (minus a KL penalty in them) are all equal: drop them from the update, keep "
        "them, or replace them by new prompts (resample).",
    )
    count_dropped_groups: bool | None = Field(
        default=None,
        description="Under zero_variance=drop, count dropped groups in the denominators and batch statistics of the "
        "loss: true = as TRL, and verl without filter_groups; null = false, as verl's filter_groups.",
    )
    max_resample_rounds: int | None = Field(
        default=None,
        ge=1,
        description="Maximum sampling rounds per step under zero_variance=resample, with the first; null = 4.",
    )

    @property
    def zero_variance_policy(self) -> Literal["drop", "keep", "resample"]:
        return self.zero_variance

    @property
    def counts_dropped_groups(self) -> bool:
        return value_or_default(self.count_dropped_groups, False)

    @property
    def max_rounds(self) -> int:
        return value_or_default(self.max_resample_rounds, 4) if self.zero_variance == "resample" else 1

    def problems(self, job: Any) -> list[tuple[str, str]]:
        found = super().problems(job)
        for option, user in {"max_resample_rounds": "resample", "count_dropped_groups": "drop"}.items():
            if getattr(self, option) is not None and self.zero_variance != user:
                text = f"not used with zero_variance={self.zero_variance}; it belongs to zero_variance={user}"
                found.append((f"algorithm.{option}", text))
        if self.zero_variance == "resample" and job.data.is_stream:
            text = "resample needs a second order of the rows, which data.streaming=true lacks; type keep or drop"
            found.append(("algorithm.zero_variance", text))
        if self.zero_variance == "resample" and self.kl_location == "reward":
            text = "groups are replaced before the KL in their rewards is computed; type algorithm.zero_variance=drop"
            found.append(("algorithm.zero_variance", text))
        compares = "group" in selected_function(self, "advantage").inputs
        if self.group_size == 1 and compares:
            text = f"advantage={self.advantage} compares the completions of a group; set 2 or more"
            found.append(("algorithm.group_size", text))
        if not compares and self.zero_variance != "keep":
            found.append(("algorithm.zero_variance", f"advantage={self.advantage} also uses equal rewards; type keep"))
        return found


@with_options
class PpoConfig(PolicyConfig):
    """Proximal policy optimization (1707.06347) with a critic and generalized advantages (1506.02438)."""

    factory: ClassVar[str] = "runner.algorithm.policy.policy_gradient:build"
    default_kl_location: ClassVar[Literal["loss", "reward"]] = "reward"
    name: Literal["ppo"] = "ppo"
    group_size: int = Field(default=1, ge=1, description="Completions sampled per prompt.")
    gamma: float = Field(default=1.0, gt=0, le=1, description="Discount per token.")
    lam: float = Field(default=0.95, ge=0, le=1, description="GAE's lambda.")
    value_clip: float | None = Field(default=0.2, gt=0, description="Clip range of the value loss; null = none.")
    critic: Literal["separate", "shared"] = Field(
        default="separate",
        description="separate = its own critic model; shared = a value head on the policy's backbone.",
    )
    critic_lr: float | None = Field(
        default=None, gt=0, description="Learning rate of a separate critic; null = optimizer.lr."
    )
    value_coef: float | None = Field(
        default=None, gt=0, description="Weight of the value loss of a shared critic; null = 0.1 (1909.08593)."
    )
    normalize_advantages: bool = Field(default=True, description="Whiten the advantages over the step's tokens.")
    whiten_ddof: int | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Degrees of freedom that the variance of whitening subtracts: 1 = Bessel; null = 0.",
    )

    def trained_models(self) -> dict[str, Head]:
        return {"policy": "lm+value"} if self.critic == "shared" else {"policy": "lm", "critic": "scalar"}

    @property
    def critic_options(self) -> "PpoConfig":
        return self

    @property
    def critic_role(self) -> str:
        """The model that gives the values."""
        return "policy" if self.critic == "shared" else "critic"

    @property
    def shared_value_coef(self) -> float | None:
        """Weight of the value loss in the policy's; None = the critic has a loss of its own."""
        return value_or_default(self.value_coef, 0.1) if self.critic == "shared" else None

    def problems(self, job: Any) -> list[tuple[str, str]]:
        found = super().problems(job)
        if self.critic == "shared" and self.critic_lr is not None:
            found.append(("algorithm.critic_lr", "critic=shared is trained with optimizer.lr; leave it out"))
        if self.whiten_ddof is not None and not self.normalize_advantages:
            text = "not used with normalize_advantages=false; it belongs to normalize_advantages=true"
            found.append(("algorithm.whiten_ddof", text))
        if self.critic == "separate" and self.value_coef is not None:
            text = "a separate critic has its own loss; type algorithm.critic=shared, or leave it out"
            found.append(("algorithm.value_coef", text))
        return found

    def suggest_instead(self, head: Head, objection: str) -> tuple[str, str]:
        shared = f"{objection}; type algorithm.critic=separate"
        return ("algorithm.critic", shared) if head == "lm+value" else super().suggest_instead(head, objection)

    def learning_rate(self, role: str, common: float) -> float:
        return self.critic_lr if role == "critic" and self.critic_lr is not None else common


@with_options
class OpdConfig(TeacherBasedConfig, PolicyConfig):
    """On-policy distillation: the student samples; a token's advantage is log p_teacher − log p_student."""

    factory: ClassVar[str] = "runner.algorithm.policy.policy_gradient:build"
    models: ClassVar[Mapping[str, Mapping[str, str]]] = {**TeacherBasedConfig.models, **PolicyConfig.models}
    needs_reward: ClassVar[bool] = False
    name: Literal["opd"] = "opd"
    group_size: int = Field(default=1, ge=1, description="Completions sampled per prompt.")
    kl_in: Literal["loss"] | None = Field(
        default=None, description="The KL penalty is added to the loss, as there is no reward."
    )
