"""What a user can set of an optimizer."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from runner.spec.base import ComponentConfig, Pair


class OptimizerConfig(ComponentConfig):
    """How gradients become an update."""

    group: ClassVar[str] = "optimizer"
    lr: float = Field(default=1e-5, gt=0, description="Peak learning rate; the schedule multiplies it.")
    weight_decay: float = Field(default=0.0, ge=0, description="Decay of matrices; biases and norms are not decayed.")
    clip_norm: float | None = Field(default=1.0, gt=0, description="Largest global gradient norm; null = no clipping.")


class AdamWConfig(OptimizerConfig):
    """AdamW (Loshchilov & Hutter, 1711.05101)."""

    factory: ClassVar[str] = "runner.optimizer.adamw:build"
    name: Literal["adamw"] = "adamw"
    betas: Annotated[Pair, Field(description="Decay rates of the first and second moment.")] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0, description="Added to the root of the second moment.")
    fused: bool = Field(default=True, description="Use torch's fused kernel where the device has one.")


class SgdConfig(OptimizerConfig):
    """Stochastic gradient descent."""

    factory: ClassVar[str] = "runner.optimizer.sgd:build"
    name: Literal["sgd"] = "sgd"
    momentum: float = Field(default=0.0, ge=0, lt=1, description="Share of the previous update that is kept.")


COMPONENTS = (AdamWConfig, SgdConfig)
