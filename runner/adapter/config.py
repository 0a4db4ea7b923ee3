"""What of the model is trained: all of it, or a low-rank adapter."""

from typing import Any, ClassVar, Literal

from pydantic import Field

from runner.spec.base import ComponentConfig, Names


class AdapterConfig(ComponentConfig):
    """Which parameters learn."""

    group: ClassVar[str] = "adapter"


class NoAdapterConfig(AdapterConfig):
    """Full fine-tuning: every parameter learns."""

    factory: ClassVar[str] = "runner.adapter.full:attach"
    name: Literal["none"] = "none"

    def problems(self, job: Any) -> list[tuple[str, str]]:
        if job.model.dtype == "float32":
            return []
        text = f"{job.model.dtype} weights round most updates of full fine-tuning away"
        return [("model.dtype", f"{text}; type model.dtype=float32 model.autocast=bfloat16, or adapter=lora")]


class LoraConfig(AdapterConfig):
    """Low-rank adaptation through peft (Hu et al., 2106.09685)."""

    factory: ClassVar[str] = "runner.adapter.lora:attach"
    name: Literal["lora"] = "lora"
    rank: int = Field(default=16, ge=1, description="Rank r of the update B·A.")
    alpha: float = Field(
        default=32.0, gt=0, description="Scale: the update is multiplied by alpha/rank (alpha/√rank for rsLoRA)."
    )
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout on the adapter's input.")
    targets: Literal["all-linear"] | Names = Field(
        default="all-linear",
        description="Module names that get an adapter, e.g. [q_proj,v_proj]; all-linear = every linear but the head.",
    )
    modules_to_save: Names = Field(
        default=(), description="Modules trained in full beside the adapter, e.g. [lm_head]."
    )
    dora: bool = Field(default=False, description="Weight-decomposed adaptation (Liu et al., 2402.09353).")
    rslora: bool = Field(default=False, description="Rank-stabilised scale alpha/√rank (Kalajdzievski, 2312.03732).")

    def problems(self, job: Any) -> list[tuple[str, str]]:
        if job.model.dtype == "float32" or not self.modules_to_save:
            return []
        text = f"these are trained in full, and {job.model.dtype} weights round most of their updates away"
        return [("adapter.modules_to_save", f"{text}; type model.dtype=float32 model.autocast=bfloat16")]


COMPONENTS = (NoAdapterConfig, LoraConfig)
