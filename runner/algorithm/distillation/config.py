"""What a user can set of distillation: a student learns from a teacher, on its own samples (opd) or on given answers
(distill)."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field

from runner.algorithm.base import AlgorithmConfig, Frozen
from runner.algorithm.policy.config import PolicyConfig
from runner.spec.base import absolute_if_local


class TaughtConfig(AlgorithmConfig):
    """What learns from a teacher: another model with the same tokenizer, which only scores."""

    teacher: str = Field(
        min_length=1,
        description="The teacher: a model's folder, a run, recipe:NAME, which is run first, or a hub id.",
    )
    teacher_revision: str | None = Field(
        default=None, description="Branch, tag or commit of a teacher on the hub; null = its default branch."
    )

    def frozen(self) -> Mapping[str, Frozen]:
        return {**super().frozen(), "teacher": Frozen(path=self.teacher, revision=self.teacher_revision)}

    def absolute(self) -> Self:
        return self.model_copy(update={"teacher": absolute_if_local(self.teacher)})


class OpdConfig(TaughtConfig, PolicyConfig):
    """On-policy distillation: the student samples, and each token is worth log p_teacher − log p_student."""

    factory: ClassVar[str] = "runner.algorithm.policy.optimisation:build"
    rewarded: ClassVar[bool] = False
    name: Literal["opd"] = "opd"
    group_size: int = Field(default=1, ge=1, description="Answers sampled per prompt.")
    kl_place: Literal["loss"] | None = Field(
        default=None, description="Where the KL penalty from the reference goes: there is no reward to lower."
    )
    zero_variance: Literal["keep"] = Field(default="keep", description="A teacher needs no contrast within a group.")


class DistillConfig(TaughtConfig):
    """Offline distillation: the divergence of whole distributions, teacher from student, on given answers' tokens."""

    factory: ClassVar[str] = "runner.algorithm.distillation.offline:build"
    explains: ClassVar[str | None] = "runner.algorithm.given_formula:distillation"
    name: Literal["distill"] = "distill"
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = Field(
        default="forward_kl", description="KL(teacher ‖ student), KL(student ‖ teacher), or what lies between them."
    )
    beta: float | None = Field(
        default=None, gt=0, lt=1, description="Weight of the teacher in jsd's mixture (2306.13649); null = 0.5."
    )
    temperature: float = Field(
        default=1.0, gt=0, description="Divides both models' logits; the divergence is multiplied by its square."
    )
    top_k: int | None = Field(
        default=None, ge=1, description="Compare the teacher's k likeliest tokens, and the others as one; null = all."
    )
    sft_coef: float = Field(default=0.0, ge=0, description="Weight of the given tokens' cross-entropy beside it.")

    @property
    def mixture(self) -> float:
        """beta as it is used."""
        return 0.5 if self.beta is None else self.beta

    def problems(self, job: Any) -> list[tuple[str, str]]:
        found = super().problems(job)
        if self.beta is not None and self.divergence != "jsd":
            text = f"not used with divergence={self.divergence}; it belongs to divergence=jsd"
            found.append(("algorithm.beta", text))
        return found
