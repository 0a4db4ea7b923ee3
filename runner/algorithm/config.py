"""What a user can set of an algorithm."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from runner.algorithm.base import AlgorithmConfig as AlgorithmConfig
from runner.algorithm.base import TeacherBasedConfig
from runner.algorithm.loss_registry import RegisteredFunction, with_options
from runner.algorithm.policy.config import GrpoConfig, OpdConfig, PpoConfig
from runner.algorithm.preference.config import DpoConfig, KtoConfig, RmConfig

SftAggregation = Literal["token_mean", "seq_mean_token_mean"]
SFT_AGGREGATION: Any = Field(
    default="token_mean",
    description="Aggregation of token losses: the mean over all tokens of a mini-batch (verl, TRL), or the mean over "
    "sequences of each sequence's token mean.",
)


class SftConfig(AlgorithmConfig):
    """Supervised fine-tuning: cross-entropy on the completion's tokens."""

    factory: ClassVar[str] = "runner.algorithm.sft:build"
    explain_fn: ClassVar[str | None] = "runner.algorithm.explain:likelihood"
    name: Literal["sft"] = "sft"
    loss_aggregation: SftAggregation = SFT_AGGREGATION


class CptConfig(AlgorithmConfig):
    """Continued pre-training: cross-entropy on every token of the text."""

    factory: ClassVar[str] = "runner.algorithm.sft:build"
    explain_fn: ClassVar[str | None] = "runner.algorithm.explain:likelihood"
    loss_on_prompt: ClassVar[bool] = True
    name: Literal["cpt"] = "cpt"
    loss_aggregation: SftAggregation = SFT_AGGREGATION

    def problems(self, job: Any) -> list[tuple[str, str]]:
        found = super().problems(job)
        if job.chat.train_on != "assistant":
            text = "algorithm=cpt trains on every token; leave it out, or type algorithm=sft"
            found.append(("chat.train_on", text))
        return found


@with_options
class DistillConfig(TeacherBasedConfig):
    """Offline distillation: divergence of the student's distributions from the teacher's, on a data set."""

    factory: ClassVar[str] = "runner.algorithm.distillation:build"
    explain_fn: ClassVar[str | None] = "runner.algorithm.explain:distillation"
    scores_within_passes: ClassVar[bool] = True
    name: Literal["distill"] = "distill"
    divergence: Annotated[str, RegisteredFunction("divergence")] = Field(
        default="forward_kl", description="KL(teacher ‖ student), KL(student ‖ teacher), or a mixture of both (JSD)."
    )
    temperature: float = Field(
        default=1.0, gt=0, description="Divides both models' logits; the divergence is multiplied by its square."
    )
    top_k: int | None = Field(
        default=None, ge=1, description="Compare the teacher's k most likely tokens, and all others as one; null = all."
    )
    sft_coef: float = Field(default=0.0, ge=0, description="Weight of an added cross-entropy loss.")


USED_BY_TINKER = (
    *("adapter.alpha", "sampler.max_num_seqs", "algorithm.micro_batch_tokens"),
    *(f"chat.{name}" for name in ("template", "kwargs", "date", "special_tokens")),
)


class TinkerAlgorithmConfig(AlgorithmConfig):
    """None of our own: clients of `run tinker` choose data, losses and steps."""

    factory: ClassVar[str] = "runner.algorithm.config:no_algorithm"
    serves: ClassVar[bool] = True
    needs_sampler: ClassVar[bool] = True
    name: Literal["tinker"] = "tinker"

    def problems(self, job: Any) -> list[tuple[str, str]]:
        wanted = {
            "parallelism": ("single", "ddp", "fsdp", "hsdp"),
            "adapter": ("lora",),
            "data": ("none",),
            "sampler": ("torch",),
            "optimizer": ("adamw",),
            "schedule": ("constant",),
            "reward": ("none",),
            "environment": ("none",),
        }
        found = [
            (group, f"run tinker does not support {group}={getattr(job, group).name}; type {group}={names[0]}")
            for group, names in wanted.items()
            if getattr(job, group).name not in names
        ]
        parts = (
            "adapter",
            "algorithm",
            "optimizer",
            "schedule",
            "sampler",
            "checkpoint",
            "evaluation",
            "watch",
            "chat",
        )
        changed = [f"{part}.{name}" for part in parts for name in _changed_options(getattr(job, part))]
        changed += [name for name in _changed_options(job) if name in ("steps", "epochs")]
        changed += [f"callbacks.{name}" for name in job.callbacks.by_name]
        text = "is not used by run tinker, because its clients run the training loop; leave it out"
        found += [(name, text) for name in changed if name not in USED_BY_TINKER]
        if self.micro_batch_tokens is None:
            found.append(("algorithm.micro_batch_tokens", "run tinker does not know its clients' rows; type a number"))
        if job.launch.samplers or job.launch.queued:
            found.append(("launch", "run tinker samples in the ranks, and starts them itself; type launch=local"))
        return found


def _changed_options(config: Any) -> list[str]:
    """The options of a component or section that have another value than their default."""
    fields = {name: field for name, field in type(config).model_fields.items() if name != "name"}
    return [name for name, field in fields.items() if getattr(config, name) != field.get_default()]


def no_algorithm(config: TinkerAlgorithmConfig, parts: Any) -> None:
    """Nothing to build."""


COMPONENTS = (
    SftConfig,
    CptConfig,
    GrpoConfig,
    PpoConfig,
    OpdConfig,
    DistillConfig,
    DpoConfig,
    KtoConfig,
    RmConfig,
    TinkerAlgorithmConfig,
)
