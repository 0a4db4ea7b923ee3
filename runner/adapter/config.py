"""What of the model is trained: all of it, or a low-rank adapter."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from runner.spec.base import ComponentConfig, Names


class AdapterConfig(ComponentConfig):
    """Which parameters learn."""

    group: ClassVar[str] = "adapter"
    trains_base: ClassVar[bool] = False  # whether the model's own weights are trainable
    default_lr: ClassVar[float] = 1e-5  # of optimizer.lr=null

    @property
    def dropout_rate(self) -> float:
        """The rate of dropout on what goes into it."""
        return 0.0

    @property
    def needs_whole_layers(self) -> str | None:
        """The option that needs unsplit layers, which tensor parallelism and vLLM lack; or None."""
        return None

    @property
    def trained_modules(self) -> Names:
        """Modules of the base that are fully trained beside it."""
        return ()


class NoAdapterConfig(AdapterConfig):
    """Full fine-tuning: every parameter is trainable."""

    factory: ClassVar[str] = "runner.adapter.lora:train_all"
    name: Literal["none"] = "none"
    trains_base: ClassVar[bool] = True


class LoraConfig(AdapterConfig):
    """Low-rank adaptation through peft (Hu et al., 2106.09685)."""

    factory: ClassVar[str] = "runner.adapter.lora:attach"
    # ten times that of full fine-tuning (Schulman et al., LoRA Without Regret, 2025)
    default_lr: ClassVar[float] = 1e-4
    name: Literal["lora"] = "lora"
    rank: int = Field(default=16, ge=1, description="Rank r of the update B·A.")
    alpha: float = Field(
        default=32.0, gt=0, description="Scales the update by alpha/rank (alpha/√rank with adapter.rslora)."
    )
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout on the adapter's input.")
    targets: Literal["all-linear"] | Names = Field(
        default="all-linear",
        description="Modules that get an adapter, e.g. [q_proj,v_proj]; all-linear = all linear layers but the head.",
    )
    modules_to_save: Names = Field(
        default=(), description="Modules that are fully trained in addition to the adapter, e.g. [lm_head]."
    )
    dora: bool = Field(default=False, description="Weight-decomposed LoRA, DoRA (Liu et al., 2402.09353).")
    rslora: bool = Field(default=False, description="Rank-stabilized scale alpha/√rank (Kalajdzievski, 2312.03732).")

    @property
    def dropout_rate(self) -> float:
        return self.dropout

    @property
    def needs_whole_layers(self) -> str | None:
        return "adapter.dora" if self.dora else None

    @property
    def trained_modules(self) -> Names:
        return self.modules_to_save


class SharedBaseConfig(LoraConfig):
    """A frozen base that LoRA adapters join and leave; `run tinker` makes it of the job's LoRA."""

    factory: ClassVar[str] = "runner.adapter.lora:prepare_shared_base"


COMPONENTS = (NoAdapterConfig, LoraConfig)
