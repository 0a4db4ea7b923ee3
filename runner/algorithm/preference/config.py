"""What a user can set of the algorithms that learn from preferences: dpo and its kin, kto, and rm.

An option that the chosen loss does not use has no value (null), and setting it is an error; null stands for the
default that its description names.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from runner.algorithm.base import AlgorithmConfig, ComparingConfig, Frozen
from runner.spec.base import Head, ItemKind

PairLoss = Literal[
    "sigmoid",
    "conservative",
    "robust",
    "hinge",
    "ipo",
    "ipo_averaged",
    "sigmoid_norm",
    "apo_zero",
    "apo_down",
    "simpo",
    "orpo",
    "cpo",
    "cpo_averaged",
]

# loss → the options it uses and their defaults, each its paper's
DEFAULTS: dict[str, dict[str, float]] = {
    "sigmoid": {"beta": 0.1},
    "conservative": {"beta": 0.1, "label_smoothing": 0.1},
    "robust": {"beta": 0.1, "label_smoothing": 0.1},
    "hinge": {"beta": 0.1},
    "ipo": {"beta": 0.1},
    "ipo_averaged": {"beta": 0.1},
    "sigmoid_norm": {"beta": 5.0},
    "apo_zero": {"beta": 0.1},
    "apo_down": {"beta": 0.1},
    "simpo": {"beta": 2.0, "gamma": 1.0},
    "orpo": {"lam": 0.1},
    "cpo": {"beta": 0.1, "alpha": 1.0},
    "cpo_averaged": {"beta": 0.1, "alpha": 1.0},
}
WITHOUT_REFERENCE = ("simpo", "orpo", "cpo", "cpo_averaged")


class PreferenceConfig(ComparingConfig):
    """What the algorithms with a reference model have in common."""

    reference: Literal["adapter", "copy", "cached"] | None = Field(
        default=None,
        description="The reference: the model with its adapter off, a frozen copy, or what they say, computed before "
        "the first step and kept on disk; null = adapter if there is one.",
    )

    def frozen(self) -> Mapping[str, Frozen]:
        return {"reference": Frozen(self.reference)}

    def problems(self, job: Any) -> list[tuple[str, str]]:
        found = super().problems(job)
        if self.frozen() and self.reference == "adapter" and job.adapter.name == "none":
            text = "there is no adapter to switch off; type adapter=lora, or algorithm.reference=copy"
            found.append(("algorithm.reference", text))
        return found


class DpoConfig(PreferenceConfig):
    """Direct preference optimisation (2305.18290) and its kin: a loss of the two answers' log-probabilities."""

    factory: ClassVar[str] = "runner.algorithm.preference.learning:build_dpo"
    explains: ClassVar[str | None] = "runner.algorithm.given_formula:pairs"
    items: ClassVar[ItemKind] = "pairs"
    name: Literal["dpo"] = "dpo"
    loss: PairLoss = Field(
        default="sigmoid",
        description="Loss per pair; simpo, orpo and the two cpo need no reference model. docs/preference.md has each.",
    )
    beta: float | None = Field(
        default=None,
        gt=0,
        description="Factor of the log-ratios (ipo: the paper's tau); null = 0.1, 2 for simpo, 5 for sigmoid_norm.",
    )
    label_smoothing: float | None = Field(
        default=None,
        ge=0,
        le=0.5,
        description="Share of labels taken to be flipped (conservative, robust; robust below 0.5); null = 0.1.",
    )
    gamma: float | None = Field(
        default=None, ge=0, description="simpo's target margin of rewards, not divided by beta; null = 1.0."
    )
    lam: float | None = Field(default=None, ge=0, description="orpo's weight of the odds ratio; null = 0.1.")
    alpha: float | None = Field(
        default=None, ge=0, description="Weight of the chosen answer's likelihood in cpo, cpo_averaged; null = 1.0."
    )
    share_prompts: bool = Field(
        default=True, description="Compute the prompt of a pair once; changes speed, not the numbers."
    )

    def frozen(self) -> Mapping[str, Frozen]:
        return {} if self.loss in WITHOUT_REFERENCE else super().frozen()

    def options(self) -> dict[str, float]:
        """The options that the loss uses, each with its value in force."""
        return DEFAULTS[self.loss] | self._given()

    def _given(self) -> dict[str, float]:
        """The options that were set, whether the loss uses them or not."""
        every = {
            "beta": self.beta,
            "label_smoothing": self.label_smoothing,
            "gamma": self.gamma,
            "lam": self.lam,
            "alpha": self.alpha,
        }
        return {name: value for name, value in every.items() if value is not None}

    def problems(self, job: Any) -> list[tuple[str, str]]:
        used = DEFAULTS[self.loss]
        found = [
            (f"algorithm.{name}", f"algorithm.loss={self.loss} does not use it; it uses {', '.join(used)}")
            for name in self._given()
            if name not in used
        ]
        if self.loss in WITHOUT_REFERENCE and self.reference is not None:
            found.append(("algorithm.reference", f"algorithm.loss={self.loss} has no reference model; leave it out"))
        if self.loss == "robust" and self.label_smoothing == 0.5:
            found.append(("algorithm.label_smoothing", "robust divides by 1 − 2·label_smoothing; set it below 0.5"))
        return [*super().problems(job), *found]


class KtoConfig(PreferenceConfig):
    """Kahneman-Tversky optimisation (2402.01306): answers judged good or bad, one by one."""

    factory: ClassVar[str] = "runner.algorithm.preference.learning:build_kto"
    explains: ClassVar[str | None] = "runner.algorithm.given_formula:judged"
    items: ClassVar[ItemKind] = "judged"
    name: Literal["kto"] = "kto"
    beta: float = Field(default=0.1, gt=0, description="Factor of the log-ratios.")
    desirable_weight: float = Field(
        default=1.0,
        ge=0,
        description="Weight of good answers; with its number it should be 1 to 4/3 times the bad ones' product.",
    )
    undesirable_weight: float = Field(default=1.0, ge=0, description="Weight of bad answers.")

    def problems(self, job: Any) -> list[tuple[str, str]]:
        found = super().problems(job)
        if self.batch_size < 2 * self.mini_batches:
            text = "a mini-batch needs at least 2 answers: its baseline z swaps their prompts; raise it, or lower"
            found.append(("algorithm.batch_size", f"{text} algorithm.mini_batches={self.mini_batches}"))
        return found


class RmConfig(AlgorithmConfig):
    """A reward model from pairs: Bradley-Terry on the scores of the two answers."""

    factory: ClassVar[str] = "runner.algorithm.preference.reward_model:build"
    explains: ClassVar[str | None] = "runner.algorithm.given_formula:scores"
    items: ClassVar[ItemKind] = "pairs"
    name: Literal["rm"] = "rm"
    use_margin: bool = Field(
        default=True,
        description="Ask the scores to lie apart by the column `margin` (2307.09288) where a pair has one.",
    )
    centring: float = Field(
        default=0.0,
        ge=0,
        description="Weight of (sum of the two scores)², which keeps them around 0; 0.01 in 2312.09244.",
    )
    share_prompts: bool = Field(
        default=True, description="Compute the prompt of a pair once; changes speed, not the numbers."
    )

    def learners(self) -> dict[str, Head]:
        return {"reward_model": "scalar"}
