"""What a user can set of every algorithm that learns from a teacher."""

from collections.abc import Mapping
from typing import Self

from pydantic import Field

from runner.algorithm.base import AlgorithmConfig, Frozen
from runner.spec.base import Dtype, absolute_if_local


class TaughtConfig(AlgorithmConfig):
    """What learns from a teacher: another model with the same tokenizer, which only scores."""

    teacher: str = Field(
        min_length=1,
        description="The teacher: a model's folder, a run, recipe:NAME, which is run first, or a hub id.",
    )
    teacher_revision: str | None = Field(
        default=None, description="Branch, tag or commit of a teacher on the hub; null = its default branch."
    )
    teacher_dtype: Dtype | None = Field(
        default=None,
        description="Data type of its weights, and that it computes in; null = model.dtype.",
    )

    def frozen(self) -> Mapping[str, Frozen]:
        teacher = Frozen(path=self.teacher, revision=self.teacher_revision, dtype=self.teacher_dtype)
        return {**super().frozen(), "teacher": teacher}

    def first_models(self) -> Mapping[str, str]:
        return {**super().first_models(), "teacher": self.teacher}

    def absolute(self) -> Self:
        return self.model_copy(update={"teacher": absolute_if_local(self.teacher)})
