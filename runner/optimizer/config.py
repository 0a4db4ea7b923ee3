"""What a user can set of an optimizer."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from runner.spec.base import ComponentConfig, Dtype, Pair


class OptimizerConfig(ComponentConfig):
    """How gradients become an update."""

    group: ClassVar[str] = "optimizer"
    lr: float = Field(default=1e-5, gt=0, description="Peak learning rate; the schedule multiplies it.")
    weight_decay: float = Field(default=0.0, ge=0, description="Decay of matrices; biases and norms are not decayed.")
    clip_norm: float | None = Field(default=1.0, gt=0, description="Largest global gradient norm; null = no clipping.")

    @property
    def weights_dtype(self) -> Dtype:
        """The data type that it wants trainable weights of the model stored in."""
        return "float32"

    def state_bytes(self, weight: int, *, end: bool = False) -> float:
        """Bytes that it keeps of a trained number that takes `weight` bytes; end: of embedding or head."""
        return 2.0 * weight

    @property
    def steps_at_once(self) -> bool:
        """Whether a step takes temporaries of all that is trained, and not of a tensor at a time."""
        return False


class AdamWConfig(OptimizerConfig):
    """AdamW (Loshchilov & Hutter, 1711.05101)."""

    factory: ClassVar[str] = "runner.optimizer.adamw:build"
    name: Literal["adamw"] = "adamw"
    betas: Annotated[Pair, Field(description="Decay rates of the first and second moment.")] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0, description="Added to the root of the second moment.")
    fused: bool = Field(default=True, description="Use torch's fused kernel where the device has one.")

    @property
    def steps_at_once(self) -> bool:
        return not self.fused


class SgdConfig(OptimizerConfig):
    """Stochastic gradient descent."""

    factory: ClassVar[str] = "runner.optimizer.sgd:build"
    name: Literal["sgd"] = "sgd"
    momentum: float = Field(default=0.0, ge=0, lt=1, description="Share of the previous update that is kept.")

    def state_bytes(self, weight: int, *, end: bool = False) -> float:
        return float(weight) if self.momentum else 0.0

    @property
    def steps_at_once(self) -> bool:
        return True


COMPONENTS = (AdamWConfig, SgdConfig)
