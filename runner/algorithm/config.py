"""What a user can set of an algorithm."""

from typing import Any, ClassVar, Literal

from pydantic import Field

from runner.spec.base import ComponentConfig


class AlgorithmConfig(ComponentConfig):
    """How a step learns, and the one batch vocabulary."""

    group: ClassVar[str] = "algorithm"
    batch_size: int = Field(default=32, ge=1, description="Examples (pairs, prompts) per step, over all ranks.")
    mini_batches: int = Field(
        default=1, ge=1, description="Optimizer steps per step; each takes an equal share of the batch."
    )
    micro_batch_tokens: int = Field(
        default=4096,
        ge=1,
        description="Tokens that are on a device at once; changes memory and speed, never the update.",
    )

    def problems(self, job: Any) -> list[tuple[str, str]]:
        if self.batch_size % self.mini_batches:
            return [
                (
                    "algorithm.mini_batches",
                    f"{self.mini_batches} does not divide algorithm.batch_size={self.batch_size}",
                )
            ]
        return []


class SftConfig(AlgorithmConfig):
    """Supervised fine-tuning: cross-entropy on the answer's tokens, mean over the step's tokens."""

    factory: ClassVar[str] = "runner.algorithm.sft:build"
    name: Literal["sft"] = "sft"


class CptConfig(AlgorithmConfig):
    """Continued pre-training: cross-entropy on every token of the text."""

    factory: ClassVar[str] = "runner.algorithm.sft:build"
    name: Literal["cpt"] = "cpt"


COMPONENTS = (SftConfig, CptConfig)
