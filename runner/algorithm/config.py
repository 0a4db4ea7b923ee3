"""What a user can set of an algorithm."""

from collections.abc import Iterable
from typing import Any, ClassVar, Literal

from runner.algorithm.base import AlgorithmConfig as AlgorithmConfig
from runner.algorithm.policy_config import GrpoConfig, PpoConfig
from runner.algorithm.preference_config import DpoConfig, KtoConfig, RmConfig


class SftConfig(AlgorithmConfig):
    """Supervised fine-tuning: cross-entropy on the answer's tokens, mean over the step's tokens."""

    factory: ClassVar[str] = "runner.algorithm.sft:build"
    name: Literal["sft"] = "sft"

    def formula(self, job: Any) -> Iterable[str]:
        return ("loss = −Σ_t log π(token t) / N, over the answers' tokens; N = their number in the whole step",)


class CptConfig(AlgorithmConfig):
    """Continued pre-training: cross-entropy on every token of the text."""

    factory: ClassVar[str] = "runner.algorithm.sft:build"
    name: Literal["cpt"] = "cpt"

    def formula(self, job: Any) -> Iterable[str]:
        return ("loss = −Σ_t log π(token t) / N, over every token of the text; N = their number in the whole step",)


COMPONENTS = (SftConfig, CptConfig, GrpoConfig, PpoConfig, DpoConfig, KtoConfig, RmConfig)
