"""Options of preference algorithms: DPO and its variants, KTO, and reward models.

An option that the chosen loss does not use has no value (null), and setting it is an error; null stands for the
default that its description names.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from runner.algorithm.base import AlgorithmConfig, FrozenModelSpec, ReferenceBasedConfig
from runner.algorithm.loss_registry import RegisteredFunction, resolved_options, selected_function, with_options
from runner.spec.base import Head, ItemKind


class PreferenceConfig(ReferenceBasedConfig):
    """What the algorithms with a reference model have in common."""

    reference: Literal["adapter", "copy", "cached"] | None = Field(
        default=None,
        description="Reference model: adapter = the policy with its adapter disabled; copy = a frozen copy; cached = "
        "log-probabilities computed before the first step and stored on disk. null = adapter where this job adds a "
        "new adapter, else copy.",
    )

    def frozen_models(self) -> Mapping[str, FrozenModelSpec]:
        return {"reference": self.reference_model(self.reference)}

    def problems(self, job: Any) -> list[tuple[str, str]]:
        return super().problems(job) + self.reference_problems(self.reference if self.frozen_models() else None, job)


@with_options
class DpoConfig(PreferenceConfig):
    """Direct preference optimization (2305.18290) and its variants, on pairs of completions."""

    factory: ClassVar[str] = "runner.algorithm.preference.learning:build_dpo"
    explain_fn: ClassVar[str | None] = "runner.algorithm.explain:pairs"
    item_kind: ClassVar[ItemKind] = "pairs"
    name: Literal["dpo"] = "dpo"
    loss: Annotated[str, RegisteredFunction("preference_loss")] = Field(default="sigmoid", description="Loss per pair.")
    sft_coef: float = Field(
        default=0.0,
        ge=0,
        description="Weight of an added cross-entropy loss per token of the chosen completion (RPO 2404.19733).",
    )
    share_prompts: bool = Field(
        default=True, description="Compute the prompt of a pair once; changes speed, not the numbers."
    )

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares the policy with a reference."""
        return any(name.endswith("_log_ratios") for name in selected_function(self, "loss").inputs)

    def frozen_models(self) -> Mapping[str, FrozenModelSpec]:
        return super().frozen_models() if self.has_reference else {}

    def problems(self, job: Any) -> list[tuple[str, str]]:
        found = super().problems(job)
        if not self.has_reference and self.reference is not None:
            found.append(("algorithm.reference", f"algorithm.loss={self.loss} has no reference model; leave it out"))
        if self.loss == "robust" and resolved_options(self, "loss")["label_smoothing"] == 0.5:
            found.append(("algorithm.label_smoothing", "robust divides by 1 − 2·label_smoothing; set it below 0.5"))
        return found


class KtoConfig(PreferenceConfig):
    """Kahneman-Tversky optimization (2402.01306): completions labeled good or bad, one by one."""

    factory: ClassVar[str] = "runner.algorithm.preference.learning:build_kto"
    explain_fn: ClassVar[str | None] = "runner.algorithm.explain:labeled_completions"
    item_kind: ClassVar[ItemKind] = "judged"
    name: Literal["kto"] = "kto"
    beta: float = Field(default=0.1, gt=0, description="Factor of the log-ratios.")
    desirable_weight: float = Field(
        default=1.0,
        ge=0,
        description="Weight of desirable completions; weight × count should be 1 to 4/3 of the undesirable ones'.",
    )
    undesirable_weight: float = Field(default=1.0, ge=0, description="Weight of undesirable completions.")

    def problems(self, job: Any) -> list[tuple[str, str]]:
        found = super().problems(job)
        if self.batch_size < 2 * self.mini_batches:
            text = "a mini-batch needs at least 2 completions, for the KL baseline; raise it, or lower"
            found.append(("algorithm.batch_size", f"{text} algorithm.mini_batches={self.mini_batches}"))
        return found


class RmConfig(AlgorithmConfig):
    """A reward model from pairs: Bradley-Terry on the scores of the two completions."""

    factory: ClassVar[str] = "runner.algorithm.preference.learning:build"
    explain_fn: ClassVar[str | None] = "runner.algorithm.explain:scores"
    item_kind: ClassVar[ItemKind] = "pairs"
    name: Literal["rm"] = "rm"
    use_margin: bool = Field(
        default=True,
        description="Require the two scores to differ by the column `margin` (2307.09288), where a pair has one.",
    )
    center_rewards_coef: float = Field(
        default=0.0,
        ge=0,
        description="Weight of (sum of the two scores)², which keeps them around 0; 0.01 in 2312.09244.",
    )
    share_prompts: bool = Field(
        default=True, description="Compute the prompt of a pair once; changes speed, not the numbers."
    )

    def trained_models(self) -> dict[str, Head]:
        return {"reward_model": "scalar"}

    def uses_margin(self) -> bool:
        return self.use_margin
