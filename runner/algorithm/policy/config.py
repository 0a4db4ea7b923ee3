"""What a user can set of grpo, ppo and opd alone."""

from typing import Any, ClassVar, Literal

from pydantic import Field

from runner.algorithm.policy.base import PolicyConfig, given
from runner.algorithm.policy.worth import Advantage, FromCritic, FromRewards, FromTeacher
from runner.algorithm.taught import TaughtConfig
from runner.spec.base import Head


class GrpoConfig(PolicyConfig):
    """Group-relative policy optimisation (2402.03300) and its kin: no critic, advantages from the group's rewards."""

    factory: ClassVar[str] = "runner.algorithm.policy.optimisation:build"
    name: Literal["grpo"] = "grpo"
    advantage: Advantage = Field(
        default="group_mean_std", description="What a reward is compared with, and how it is scaled."
    )
    gamma: float | None = Field(default=None, gt=0, le=1, description="Discount of reinforce_pp; null = 1.0.")
    zero_variance: Literal["drop", "keep", "resample"] = Field(
        default="drop",
        description="Groups whose rewards are all equal: left out of the update, kept, or replaced by new prompts.",
    )
    resample_rounds: int | None = Field(
        default=None, ge=1, description="Most rounds of new prompts per step under zero_variance=resample; null = 4."
    )

    @property
    def worth(self) -> FromRewards:
        return FromRewards(self.advantage, given(self.gamma, 1.0))

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


class OpdConfig(TaughtConfig, PolicyConfig):
    """On-policy distillation: the student samples, and each token is worth log p_teacher − log p_student."""

    factory: ClassVar[str] = "runner.algorithm.policy.optimisation:build"
    rewarded: ClassVar[bool] = False
    name: Literal["opd"] = "opd"
    group_size: int = Field(default=1, ge=1, description="Answers sampled per prompt.")
    kl_place: Literal["loss"] | None = Field(
        default=None, description="Where the KL penalty from the reference goes: there is no reward to lower."
    )

    @property
    def worth(self) -> FromTeacher:
        return FromTeacher()
