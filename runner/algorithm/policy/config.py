"""What a user can set of policy optimisation: grpo and ppo, and by presets their kin.

The knobs are orthogonal. One that a combination does not use has no value (null), and setting it is an error; null
stands for the default that its description names.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

from pydantic import Field

from runner.algorithm.base import AlgorithmConfig, Frozen, Head
from runner.spec.base import ItemKind

# which options belong to which choice: option → (deciding option, choices that use it)
USES: dict[str, tuple[str, tuple[str, ...]]] = {
    "clip_low": ("objective", ("clip", "cispo")),
    "clip_high": ("objective", ("clip", "cispo")),
    "dual_clip": ("objective", ("clip",)),
    "tau_positive": ("objective", ("sapo",)),
    "tau_negative": ("objective", ("sapo",)),
    "kl_coef": ("kl", ("k1", "k2", "k3", "k3_ratio", "k3_plus")),
    "kl_place": ("kl", ("k1", "k2", "k3", "k3_ratio", "k3_plus")),
    "kl_target": ("kl", ("k1", "k2", "k3", "k3_ratio", "k3_plus")),
    "reference": ("kl", ("k1", "k2", "k3", "k3_ratio", "k3_plus")),
    "correction_level": ("correction", ("tis", "mis", "decoupled")),
    "correction_high": ("correction", ("tis", "mis", "decoupled")),
    "correction_low": ("correction", ("mis",)),
    "aggregation_length": ("aggregation", ("seq_mean_token_sum_norm",)),
    "resample_rounds": ("zero_variance", ("resample",)),
}


T = TypeVar("T")


def _given(value: T | None, default: T) -> T:
    return default if value is None else value


class InForce(NamedTuple):
    """Options that may be null, with their defaults filled in."""

    clip_low: float
    clip_high: float
    tau_positive: float
    tau_negative: float
    kl_coef: float
    kl_place: Literal["loss", "reward"]
    correction_level: Literal["token", "sequence"]
    correction_low: float
    correction_high: float | None
    resample_rounds: int


class PolicyConfig(AlgorithmConfig):
    """Sampled answers, a reward, and a surrogate loss of their log-probabilities."""

    usual_kl_place: ClassVar[Literal["loss", "reward"]] = "loss"
    items: ClassVar[ItemKind] = "prompts"
    samples: ClassVar[bool] = True
    rewarded: ClassVar[bool] = True
    explains: ClassVar[str | None] = "runner.algorithm.policy.formula:formula"
    group_size: int = Field(default=8, ge=1, description="Answers sampled per prompt.")
    epochs: int = Field(default=1, ge=1, description="Passes over a step's samples.")
    share_prompts: bool = Field(
        default=True, description="Compute the prompt of a group once in training; changes speed, not the numbers."
    )
    objective: Literal["clip", "cispo", "sapo", "reinforce"] = Field(
        default="clip", description="Surrogate loss per token: PPO's clip, CISPO, SAPO, or plain policy gradient."
    )
    ratio: Literal["token", "sequence"] = Field(
        default="token", description="Level of the importance ratio; sequence = GSPO's mean over the answer's tokens."
    )
    clip_low: float | None = Field(default=None, ge=0, description="Lower clip range; null = 0.2 (clip), 1 (cispo).")
    clip_high: float | None = Field(default=None, ge=0, description="Upper clip range; null = 0.2 (clip), 4 (cispo).")
    dual_clip: float | None = Field(
        default=None, gt=1, description="Bound on the loss of negative advantages (dual clip); null = none."
    )
    tau_positive: float | None = Field(default=None, gt=0, description="SAPO's temperature for A > 0; null = 1.0.")
    tau_negative: float | None = Field(default=None, gt=0, description="SAPO's temperature for A ≤ 0; null = 1.05.")
    aggregation: Literal[
        "token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm", "prompt_mean"
    ] = Field(default="token_mean", description="How token losses become one; denominators count the whole step.")
    aggregation_length: float | None = Field(
        default=None, gt=0, description="Constant of seq_mean_token_sum_norm in tokens; null = sampler.max_new_tokens."
    )
    kl: Literal["none", "k1", "k2", "k3", "k3_ratio", "k3_plus"] = Field(
        default="none", description="Estimator of the KL divergence from the reference; none = no reference model."
    )
    kl_place: Literal["loss", "reward"] | None = Field(
        default=None, description="Where the KL penalty goes; null = loss for grpo, reward for ppo."
    )
    kl_coef: float | None = Field(default=None, ge=0, description="Weight of the KL penalty; null = 0.001.")
    kl_target: float | None = Field(
        default=None, gt=0, description="Adapt kl_coef towards this KL per token (Ziegler et al., 2019); null = fixed."
    )
    reference: Literal["adapter", "copy"] | None = Field(
        default=None,
        description="The reference: the model with its adapter off, or a frozen copy; null = adapter if there is one.",
    )
    entropy_coef: float = Field(default=0.0, description="Weight of the entropy bonus.")
    zero_variance: Literal["drop", "keep", "resample"] = Field(
        default="drop",
        description="Groups whose rewards are all equal: left out of the update, kept, or replaced by new prompts.",
    )
    resample_rounds: int | None = Field(
        default=None, ge=1, description="Most rounds of new prompts per step under zero_variance=resample; null = 4."
    )
    overlong: Literal["keep", "mask"] = Field(
        default="keep", description="Answers cut off at max_new_tokens: learnt from, or left out of the loss."
    )
    lag: int = Field(default=0, ge=0, description="Steps that sampling runs ahead of training; 0 = strictly on-policy.")
    correction: Literal["none", "tis", "mis", "decoupled"] = Field(
        default="none",
        description="Importance weights against the drift from sampler to trainer; decoupled is needed above lag 1.",
    )
    correction_level: Literal["token", "sequence"] | None = Field(
        default=None, description="Level of those weights; null = token."
    )
    correction_low: float | None = Field(default=None, ge=0, le=1, description="Lower bound of mis; null = 0.5.")
    correction_high: float | None = Field(
        default=None, ge=1, description="Upper bound of the weights; null = 2 (tis), 5 (mis), none (decoupled)."
    )
    max_mismatch: float | None = Field(
        default=None,
        gt=0,
        description="Stop if sampler and trainer differ by more than this at lag 0 (mean |log-prob.|); null = never.",
    )

    def frozen(self) -> Mapping[str, Frozen]:
        return {} if self.kl == "none" else {"reference": Frozen(self.reference)}

    def steps_ahead(self) -> int:
        return self.lag

    @property
    def in_force(self) -> InForce:
        """The values of the options that may be null, as they are used."""
        cispo = self.objective == "cispo"
        high = {"tis": 2.0, "mis": 5.0}.get(self.correction)
        return InForce(
            clip_low=_given(self.clip_low, 1.0 if cispo else 0.2),
            clip_high=_given(self.clip_high, 4.0 if cispo else 0.2),
            tau_positive=_given(self.tau_positive, 1.0),
            tau_negative=_given(self.tau_negative, 1.05),
            kl_coef=_given(self.kl_coef, 0.001),
            kl_place=_given(self.kl_place, self.usual_kl_place),
            correction_level=_given(self.correction_level, "token"),
            correction_low=_given(self.correction_low, 0.5),
            correction_high=_given(self.correction_high, high),
            resample_rounds=_given(self.resample_rounds, 4),
        )

    def problems(self, job: Any) -> list[tuple[str, str]]:
        return [*super().problems(job), *self._unused(), *self._contradictions(job)]

    def _unused(self) -> list[tuple[str, str]]:
        """Options that were set although the choice they belong to was not made."""
        return [
            (
                f"algorithm.{option}",
                f"not used with {decider}={getattr(self, decider)}; it belongs to {decider}={'|'.join(choices)}",
            )
            for option, (decider, choices) in USES.items()
            if getattr(self, option) is not None and getattr(self, decider) not in choices
        ]

    def _contradictions(self, job: Any) -> list[tuple[str, str]]:
        found = []
        if self.lag > 1 and self.correction != "decoupled":
            why = "samples are several updates old, which the clipped ratio alone does not correct"
            found.append(("algorithm.lag", f"{self.lag} needs algorithm.correction=decoupled: {why}"))
        if self.kl_target is not None and self.in_force.kl_coef == 0:
            found.append(("algorithm.kl_target", "an adaptive coefficient cannot start at kl_coef=0"))
        if self.in_force.kl_place == "reward" and self.kl not in ("none", "k1"):
            found.append(
                (
                    "algorithm.kl",
                    f"in the reward only k1 is unbiased; type algorithm.kl=k1, or kl_place=loss for {self.kl}",
                )
            )
        if self.in_force.kl_place == "loss" and self.kl == "k1":
            found.append(
                (
                    "algorithm.kl",
                    "k1 has no gradient in expectation as a loss; type algorithm.kl=k3, or kl_place=reward",
                )
            )
        if self.reference == "adapter" and job.adapter.name == "none":
            found.append(
                ("algorithm.reference", "there is no adapter to switch off; type adapter=lora, or reference=copy")
            )
        if self.ratio == "sequence" and self.aggregation != "seq_mean_token_mean":
            found.append(
                ("algorithm.aggregation", f"a sequence ratio needs seq_mean_token_mean, not {self.aggregation}")
            )
        if self.max_mismatch is not None and self.lag:
            found.append(("algorithm.max_mismatch", f"at lag={self.lag} the two differ by design; it is for lag=0"))
        return found


class GrpoConfig(PolicyConfig):
    """Group-relative policy optimisation (2402.03300) and its kin: no critic, advantages from the group's rewards."""

    factory: ClassVar[str] = "runner.algorithm.policy.optimisation:build"
    name: Literal["grpo"] = "grpo"
    advantage: Literal[
        "group_mean_std",
        "group_mean",
        "leave_one_out",
        "batch_std",
        "opo",
        "none",
        "reinforce_pp",
        "reinforce_pp_baseline",
    ] = Field(default="group_mean_std", description="What a reward is compared with, and how it is scaled.")
    gamma: float | None = Field(default=None, gt=0, le=1, description="Discount of reinforce_pp; null = 1.0.")

    def problems(self, job: Any) -> list[tuple[str, str]]:
        found = super().problems(job)
        if self.gamma is not None and self.advantage != "reinforce_pp":
            found.append(
                ("algorithm.gamma", f"not used with advantage={self.advantage}; it belongs to advantage=reinforce_pp")
            )
        alone = ("none", "reinforce_pp")
        if self.group_size == 1 and self.advantage not in alone:
            found.append(
                (
                    "algorithm.group_size",
                    f"advantage={self.advantage} compares within a group; 1 gives nothing to learn",
                )
            )
        if self.advantage in alone and self.zero_variance != "keep":
            found.append(
                ("algorithm.zero_variance", f"advantage={self.advantage} learns from equal rewards too; type keep")
            )
        return found


class PpoConfig(PolicyConfig):
    """Proximal policy optimisation (1707.06347) with a critic and generalised advantages (1506.02438)."""

    factory: ClassVar[str] = "runner.algorithm.policy.optimisation:build"
    usual_kl_place: ClassVar[Literal["loss", "reward"]] = "reward"
    name: Literal["ppo"] = "ppo"
    group_size: int = Field(default=1, ge=1, description="Answers sampled per prompt.")
    zero_variance: Literal["keep"] = Field(default="keep", description="A critic needs no contrast within a group.")
    gamma: float = Field(default=1.0, gt=0, le=1, description="Discount per token.")
    lam: float = Field(default=0.95, ge=0, le=1, description="GAE's lambda.")
    value_clip: float | None = Field(default=0.2, gt=0, description="Clip range of the value loss; null = none.")
    critic: Literal["separate", "shared"] = Field(
        default="separate", description="The critic: a model of its own, or a value head on the policy's backbone."
    )
    critic_lr: float | None = Field(
        default=None, gt=0, description="Learning rate of a separate critic; null = optimizer.lr."
    )
    value_coef: float | None = Field(
        default=None, gt=0, description="Weight of the value loss of a shared critic; null = 0.1 (1909.08593)."
    )
    whiten: bool = Field(default=True, description="Whiten the advantages over the step's tokens.")

    def learners(self) -> dict[str, Head]:
        return {"policy": "lm+value"} if self.critic == "shared" else {"policy": "lm", "critic": "scalar"}

    @property
    def valued_by(self) -> Literal["policy", "critic"]:
        """The role whose model gives the values."""
        return "policy" if self.critic == "shared" else "critic"

    @property
    def shared_value_coef(self) -> float:
        """value_coef as it is used."""
        return _given(self.value_coef, 0.1)

    def problems(self, job: Any) -> list[tuple[str, str]]:
        found = super().problems(job)
        if self.critic == "shared" and self.critic_lr is not None:
            found.append(("algorithm.critic_lr", "critic=shared learns with optimizer.lr; leave it out"))
        if self.critic == "separate" and self.value_coef is not None:
            text = "a separate critic has a loss of its own; type algorithm.critic=shared, or leave it out"
            found.append(("algorithm.value_coef", text))
        return found

    def learning_rate(self, role: str, common: float) -> float:
        return self.critic_lr if role == "critic" and self.critic_lr is not None else common
