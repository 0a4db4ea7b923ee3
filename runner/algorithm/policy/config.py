"""What a user can set of policy optimisation: grpo, ppo, opd, and by presets their kin.

The knobs are orthogonal. One that a combination does not use has no value (null), and setting it is an error; null
stands for the default that its description names. Losses, advantages, KL estimators, aggregations and corrections are
registered functions (`runner.interfaces.losses`), which bring their own options.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

from pydantic import Field

from runner.algorithm.base import ComparingConfig, Frozen, TaughtConfig
from runner.algorithm.loss_registry import Registered, chosen, functions, with_options
from runner.spec.base import Head, ItemKind

OF_KL = ("kl_coef", "kl_place", "kl_target", "reference")
T = TypeVar("T")


def given(value: T | None, default: T) -> T:
    """An option's value, or what stands for null."""
    return default if value is None else value


@dataclass(frozen=True, slots=True)
class FromRewards:
    """By comparison with those of their group or their step, as a registered advantage does it."""


@dataclass(frozen=True, slots=True)
class FromCritic:
    """Generalised advantages, and the critic that they need.

    role: whose model gives the values; clip: range of the value loss, None = none; coefficient: weight of the value
    error in the policy's loss, None = the critic has a loss of its own
    """

    role: Literal["policy", "critic"]
    gamma: float
    lam: float
    whiten: bool
    clip: float | None
    coefficient: float | None


@dataclass(frozen=True, slots=True)
class FromTeacher:
    """The negative reverse KL, estimated on what was sampled."""


Worth = FromRewards | FromCritic | FromTeacher  # what a sample's tokens are worth: `optimisation` computes it


class InForce(NamedTuple):
    """Options that may be null, with their defaults filled in."""

    kl_coef: float
    kl_place: Literal["loss", "reward"]
    correction_level: Literal["token", "sequence"]


@with_options
class PolicyConfig(ComparingConfig):
    """Sampled answers, a reward, and a surrogate loss of their log-probabilities."""

    usual_kl_place: ClassVar[Literal["loss", "reward"]] = "loss"
    items: ClassVar[ItemKind] = "prompts"
    samples: ClassVar[bool] = True
    rewarded: ClassVar[bool] = True
    explains: ClassVar[str | None] = "runner.algorithm.explain:policy"
    group_size: int = Field(default=8, ge=1, description="Answers sampled per prompt.")
    epochs: int = Field(default=1, ge=1, description="Passes over a step's samples.")
    share_prompts: bool = Field(
        default=True, description="Compute the prompt of a group once in training; changes speed, not the numbers."
    )
    objective: Annotated[str, Registered("policy_loss")] = Field(default="clip", description="Policy loss per token.")
    ratio: Literal["token", "sequence"] = Field(
        default="token", description="Level of the importance ratio; sequence = GSPO's mean over the answer's tokens."
    )
    aggregation: Annotated[str, Registered("aggregation")] = Field(
        default="token_mean", description="How token losses become one; denominators count the whole step."
    )
    kl: Annotated[str, Registered("kl_estimator", others=("none",))] = Field(
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
    correction: Annotated[str, Registered("correction", others=("none",))] = Field(
        default="none",
        description="Importance weights against the drift from sampler to trainer; decoupled is needed above lag 1.",
    )
    correction_level: Literal["token", "sequence"] | None = Field(
        default=None, description="Level of the weights; null = token."
    )
    max_mismatch: float | None = Field(
        default=None,
        gt=0,
        description="Stop if sampler and trainer differ by more than this at lag 0 (mean |log-prob.|); null = never.",
    )

    @property
    def samples_per_prompt(self) -> int:
        return self.group_size

    def frozen(self) -> Mapping[str, Frozen]:
        return {} if self.kl == "none" else {"reference": self.referred(self.reference)}

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

    @property
    def in_force(self) -> InForce:
        """The values of the options that may be null, as they are used."""
        return InForce(
            kl_coef=given(self.kl_coef, 0.001),
            kl_place=given(self.kl_place, self.usual_kl_place),
            correction_level=given(self.correction_level, "token"),
        )

    def problems(self, job: Any) -> list[tuple[str, str]]:
        return [*super().problems(job), *self._unused(), *self._contradictions(job)]

    def _unused(self) -> list[tuple[str, str]]:
        """Options that were set although the choice they belong to was not made."""
        uses = {option: ("kl", tuple(functions("kl_estimator"))) for option in OF_KL}
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
        if self.kl_target is not None and self.in_force.kl_coef == 0:
            found.append(("algorithm.kl_target", "an adaptive coefficient cannot start at kl_coef=0"))
        if self.kl != "none" and (kl_in := chosen(self, "kl").kl_in) != self.in_force.kl_place:
            reasons = {
                "loss": "in the reward only k1 is unbiased; type algorithm.kl=k1, or",
                "reward": f"{self.kl} has no gradient in expectation as a loss; type algorithm.kl=k3, or",
            }
            found.append(("algorithm.kl", f"{reasons[kl_in]} kl_place={kl_in} for {self.kl}"))
        found += self.reference_problems(self.reference, job)
        if self.ratio == "sequence" and self.aggregation != "seq_mean_token_mean":
            found.append(
                ("algorithm.aggregation", f"a sequence ratio needs seq_mean_token_mean, not {self.aggregation}")
            )
        if self.max_mismatch is not None and self.lag:
            found.append(("algorithm.max_mismatch", f"at lag={self.lag} the two differ by design; it is for lag=0"))
        return found


@with_options
class GrpoConfig(PolicyConfig):
    """Group-relative policy optimisation (2402.03300) and its kin: no critic, advantages from the group's rewards."""

    factory: ClassVar[str] = "runner.algorithm.policy.optimisation:build"
    name: Literal["grpo"] = "grpo"
    advantage: Annotated[str, Registered("advantage")] = Field(
        default="group_mean_std", description="What a reward is compared with, and how it is scaled."
    )
    zero_variance: Literal["drop", "keep", "resample"] = Field(
        default="drop",
        description="Groups whose rewards are all equal: left out of the update, kept, or replaced by new prompts.",
    )
    resample_rounds: int | None = Field(
        default=None, ge=1, description="Most rounds of new prompts per step under zero_variance=resample; null = 4."
    )

    @property
    def worth(self) -> FromRewards:
        return FromRewards()

    @property
    def equal_rewards(self) -> Literal["drop", "keep", "resample"]:
        return self.zero_variance

    @property
    def most_rounds(self) -> int:
        return given(self.resample_rounds, 4) if self.zero_variance == "resample" else 1

    def problems(self, job: Any) -> list[tuple[str, str]]:
        found = super().problems(job)
        if self.resample_rounds is not None and self.zero_variance != "resample":
            text = f"not used with zero_variance={self.zero_variance}; it belongs to zero_variance=resample"
            found.append(("algorithm.resample_rounds", text))
        compares = "group" in chosen(self, "advantage").inputs
        if self.group_size == 1 and compares:
            found.append(
                (
                    "algorithm.group_size",
                    f"advantage={self.advantage} compares within a group; 1 gives nothing to learn",
                )
            )
        if not compares and self.zero_variance != "keep":
            found.append(
                ("algorithm.zero_variance", f"advantage={self.advantage} learns from equal rewards too; type keep")
            )
        return found


@with_options
class PpoConfig(PolicyConfig):
    """Proximal policy optimisation (1707.06347) with a critic and generalised advantages (1506.02438)."""

    factory: ClassVar[str] = "runner.algorithm.policy.optimisation:build"
    usual_kl_place: ClassVar[Literal["loss", "reward"]] = "reward"
    name: Literal["ppo"] = "ppo"
    group_size: int = Field(default=1, ge=1, description="Answers sampled per prompt.")
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
    def worth(self) -> FromCritic:
        shared = self.critic == "shared"
        return FromCritic(
            role="policy" if shared else "critic",
            gamma=self.gamma,
            lam=self.lam,
            whiten=self.whiten,
            clip=self.value_clip,
            coefficient=given(self.value_coef, 0.1) if shared else None,
        )

    def problems(self, job: Any) -> list[tuple[str, str]]:
        found = super().problems(job)
        if self.critic == "shared" and self.critic_lr is not None:
            found.append(("algorithm.critic_lr", "critic=shared learns with optimizer.lr; leave it out"))
        if self.critic == "separate" and self.value_coef is not None:
            text = "a separate critic has a loss of its own; type algorithm.critic=shared, or leave it out"
            found.append(("algorithm.value_coef", text))
        return found

    def instead(self, head: Head, objection: str) -> tuple[str, str]:
        shared = f"{objection}; type algorithm.critic=separate"
        return ("algorithm.critic", shared) if head == "lm+value" else super().instead(head, objection)

    def learning_rate(self, role: str, common: float) -> float:
        return self.critic_lr if role == "critic" and self.critic_lr is not None else common


@with_options
class OpdConfig(TaughtConfig, PolicyConfig):
    """On-policy distillation: the student samples, and each token is worth log p_teacher − log p_student."""

    factory: ClassVar[str] = "runner.algorithm.policy.optimisation:build"
    models: ClassVar[Mapping[str, Mapping[str, str]]] = {**TaughtConfig.models, **PolicyConfig.models}
    rewarded: ClassVar[bool] = False
    name: Literal["opd"] = "opd"
    group_size: int = Field(default=1, ge=1, description="Answers sampled per prompt.")
    kl_place: Literal["loss"] | None = Field(
        default=None, description="Where the KL penalty from the reference goes: there is no reward to lower."
    )

    @property
    def worth(self) -> FromTeacher:
        return FromTeacher()
