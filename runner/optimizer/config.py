"""The options of optimizers."""

import importlib.util
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from runner.core.errors import EnvironmentProblem
from runner.spec.base import ComponentConfig, Dtype, FloatPair


class OptimizerConfig(ComponentConfig):
    """The optimizer of trained parameters."""

    group: ClassVar[str] = "optimizer"
    low_bit: ClassVar[str | None] = None  # the optimizer with the same update and low-bit moments
    lr: float | None = Field(
        default=None,
        gt=0,
        description="Peak learning rate; the schedule multiplies it. null = 1e-5, with adapter=lora 1e-4.",
    )
    weight_decay: float = Field(default=0.0, ge=0, description="Weight decay of matrices; biases and norms have none.")
    clip_norm: float | None = Field(
        default=1.0, gt=0, description="Maximum global gradient norm; null = no gradient clipping."
    )

    @property
    def learning_rate(self) -> float:
        """`lr`; without it, the default of full fine-tuning."""
        return 1e-5 if self.lr is None else self.lr

    def preflight(self) -> None:
        """Raise EnvironmentProblem if a package is missing."""

    @property
    def weights_dtype(self) -> Dtype:
        """The required dtype of stored trainable weights."""
        return "float32"

    def state_bytes(self, weight: int, *, end: bool = False) -> float:
        """Bytes of optimizer state per parameter of `weight` bytes; end: of embedding or head."""
        return 2.0 * weight

    @property
    def updates_all_at_once(self) -> bool:
        """Whether a step needs temporary memory for all trained parameters at once."""
        return False


class AdamWConfig(OptimizerConfig):
    """AdamW (Loshchilov & Hutter, 1711.05101)."""

    factory: ClassVar[str] = "runner.optimizer.optimizers:build_adamw"
    low_bit: ClassVar[str | None] = "adamw8bit"
    name: Literal["adamw"] = "adamw"
    betas: Annotated[FloatPair, Field(description="Decay rates of the first and second moment.")] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0, description="Added to the root of the second moment.")
    fused: bool = Field(default=True, description="Use torch's fused kernel where the device has one.")

    @property
    def updates_all_at_once(self) -> bool:
        return not self.fused


class SgdConfig(OptimizerConfig):
    """Stochastic gradient descent."""

    factory: ClassVar[str] = "runner.optimizer.optimizers:build_sgd"
    name: Literal["sgd"] = "sgd"
    momentum: float = Field(default=0.0, ge=0, lt=1, description="Momentum.")

    def state_bytes(self, weight: int, *, end: bool = False) -> float:
        return float(weight) if self.momentum else 0.0

    @property
    def updates_all_at_once(self) -> bool:
        return True


class UnshardedOptimizerConfig(OptimizerConfig):
    """An optimizer that does not support sharded parameters."""

    layouts: ClassVar[tuple[str, ...]] = ("single", "ddp", "cp")

    def problems(self, job: Any) -> list[tuple[str, str]]:
        if job.parallelism.name in self.layouts:
            return []
        *known, last = self.layouts
        text = f"optimizer={self.name} does not support sharded parameters (parallelism={job.parallelism.name})"
        remedy = f"type parallelism={', '.join(known)} or {last}, or optimizer=adamw"
        return [("optimizer.name", f"{text}; {remedy}")]


class AdamW8bitConfig(UnshardedOptimizerConfig):
    """AdamW with 8-bit moments (Dettmers et al., 2110.02861; torchao), for a model on one card."""

    low_bit: ClassVar[str | None] = "adamw8bit"
    factory: ClassVar[str] = "runner.optimizer.optimizers:build_adamw8bit"
    name: Literal["adamw8bit"] = "adamw8bit"
    betas: Annotated[FloatPair, Field(description="Decay rates of the first and second moment.")] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0, description="Added to the root of the second moment.")
    stochastic_rounding: bool = Field(
        default=False,
        description="Store trainable weights and gradients in bfloat16 and round updates stochastically: 6 bytes per "
        "parameter instead of 10. Needs one process, model.dtype=bfloat16 and adapter=none.",
    )

    def preflight(self) -> None:
        if importlib.util.find_spec("torchao") is None:
            text = "optimizer=adamw8bit needs torchao, which is not installed"
            raise EnvironmentProblem(f"{text}\n  pip install 'torchao>=0.18'  # or type optimizer=adamw")

    @property
    def weights_dtype(self) -> Dtype:
        return "bfloat16" if self.stochastic_rounding else "float32"

    def state_bytes(self, weight: int, *, end: bool = False) -> float:
        return 2 * (1 + 4 / 256)  # one byte each, and a scale per block of 256

    def problems(self, job: Any) -> list[tuple[str, str]]:
        found, key = super().problems(job), "optimizer.stochastic_rounding"
        if not self.stochastic_rounding:
            return found
        if not job.adapter.trains_base:
            text = f"adapter={job.adapter.name} keeps its trainable weights in float32"
            found.append((key, f"{text}; stochastic rounding does not apply; remove the option"))
        if job.model.dtype == "float32":
            text = "stochastic rounding needs model.dtype=bfloat16 (here float32)"
            found.append((key, f"{text}; type model.dtype=bfloat16, or remove the option"))
        if job.launch.world > 1:
            text = "bfloat16 gradients are not all-reduced over ranks; leave it out, or type launch.devices=1"
            found.append((key, text))
        return found


class MuonConfig(UnshardedOptimizerConfig):
    """Muon (Jordan et al., 2024) for the matrices of layers, AdamW for the rest; needs torch 2.9."""

    factory: ClassVar[str] = "runner.optimizer.optimizers:build_muon"
    name: Literal["muon"] = "muon"
    momentum: float = Field(default=0.95, ge=0, lt=1, description="Momentum.")
    adjust_lr_fn: Literal["match_rms_adamw", "original"] = Field(
        default="match_rms_adamw",
        description="Scale of the learning rate by matrix shape: match_rms_adamw = update RMS of AdamW (2502.16982), "
        "so AdamW's learning rates work; original = Jordan's.",
    )
    betas: Annotated[FloatPair, Field(description="AdamW's decay rates of the first and second moment.")] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0, description="AdamW's eps, added to the root of the second moment.")

    def preflight(self) -> None:
        torch = importlib.util.find_spec("torch")
        if torch is None or not (Path(torch.origin or "").parent / "optim" / "_muon.py").exists():
            text = "optimizer=muon needs torch.optim.Muon, which the installed torch lacks"
            raise EnvironmentProblem(f"{text}\n  pip install 'torch>=2.9'  # or type optimizer=adamw")

    def state_bytes(self, weight: int, *, end: bool = False) -> float:
        return float(weight * (2 if end else 1))


COMPONENTS = (AdamWConfig, SgdConfig, AdamW8bitConfig, MuonConfig)
