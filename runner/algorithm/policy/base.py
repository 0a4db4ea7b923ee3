"""What a user can set of all policy optimisation: grpo, ppo, opd, and by presets their kin.

The knobs are orthogonal. One that a combination does not use has no value (null), and setting it is an error; null
stands for the default that its description names.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

from pydantic import Field

from runner.algorithm.base import ComparingConfig, Frozen
from runner.algorithm.policy.worth import FromCritic, Worth
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
}


T = TypeVar("T")


def given(value: T | None, default: T) -> T:
    """An option's value, or what stands for null."""
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


class PolicyConfig(ComparingConfig):
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
        default=None,
        gt=0,
        description="Constant of seq_mean_token_sum_norm in tokens; null = sampler.max_new_tokens × the turns of an "
        "episode.",
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

    def weighs_samples(self) -> bool:
        return self.old_from == "sampler" or self.correction != "none" or self.max_mismatch is not None

    @property
    def worth(self) -> Worth:
        """What a sample's tokens are worth."""
        raise NotImplementedError

    @property
    def critic_wanted(self) -> FromCritic | None:
        """The critic, where there is one."""
        return self.worth if isinstance(self.worth, FromCritic) else None

    @property
    def equal_rewards(self) -> Literal["drop", "keep", "resample"]:
        """What becomes of groups whose rewards are all equal."""
        return "keep"

    @property
    def most_rounds(self) -> int:
        """Most rounds of prompts per step."""
        return 1

    @property
    def kl_in(self) -> Literal["loss", "reward"] | None:
        """Where a KL penalty goes; None = there is none."""
        return None if self.kl == "none" else self.in_force.kl_place

    @property
    def old_from(self) -> Literal["itself", "sampler", "trainer"]:
        """Whose log-probabilities stand for the policy that the ratio is taken to.

        itself: there is one update per step, so the policy has not moved and the ratio is 1; sampler: what it
        reported; trainer: a pass before the step's first update
        """
        if self.correction != "none":
            return "trainer"
        if self.lag:
            return "sampler"
        return "trainer" if self.epochs * self.mini_batches > 1 or self.kl_in == "reward" else "itself"

    def longest_answer(self, turn_tokens: int, turns: int) -> float:
        """The constant of seq_mean_token_sum_norm, in tokens, for episodes of so many turns of so many tokens."""
        return given(self.aggregation_length, float(turn_tokens * turns))

    @property
    def in_force(self) -> InForce:
        """The values of the options that may be null, as they are used."""
        cispo = self.objective == "cispo"
        high = {"tis": 2.0, "mis": 5.0}.get(self.correction)
        return InForce(
            clip_low=given(self.clip_low, 1.0 if cispo else 0.2),
            clip_high=given(self.clip_high, 4.0 if cispo else 0.2),
            tau_positive=given(self.tau_positive, 1.0),
            tau_negative=given(self.tau_negative, 1.05),
            kl_coef=given(self.kl_coef, 0.001),
            kl_place=given(self.kl_place, self.usual_kl_place),
            correction_level=given(self.correction_level, "token"),
            correction_low=given(self.correction_low, 0.5),
            correction_high=given(self.correction_high, high),
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
