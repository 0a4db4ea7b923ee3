"""What a user can set of an algorithm."""

from typing import Any, ClassVar, Literal

from runner.algorithm.base import AlgorithmConfig as AlgorithmConfig
from runner.algorithm.distillation.config import DistillConfig
from runner.algorithm.policy.config import GrpoConfig, OpdConfig, PpoConfig
from runner.algorithm.preference.config import DpoConfig, KtoConfig, RmConfig


class SftConfig(AlgorithmConfig):
    """Supervised fine-tuning: cross-entropy on the answer's tokens, mean over the step's tokens."""

    factory: ClassVar[str] = "runner.algorithm.sft:build"
    explains: ClassVar[str | None] = "runner.algorithm.given_formula:likelihood"
    name: Literal["sft"] = "sft"


class CptConfig(AlgorithmConfig):
    """Continued pre-training: cross-entropy on every token of the text."""

    factory: ClassVar[str] = "runner.algorithm.sft:build"
    explains: ClassVar[str | None] = "runner.algorithm.given_formula:likelihood"
    learns_all: ClassVar[bool] = True
    name: Literal["cpt"] = "cpt"

    def problems(self, job: Any) -> list[tuple[str, str]]:
        found = super().problems(job)
        if getattr(job.data, "loss_on", "assistant") != "assistant":
            found.append(("data.loss_on", "algorithm=cpt learns every token; leave it out, or type algorithm=sft"))
        return found


COMPONENTS = (SftConfig, CptConfig, GrpoConfig, PpoConfig, OpdConfig, DistillConfig, DpoConfig, KtoConfig, RmConfig)
