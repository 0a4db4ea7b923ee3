"""What the arms of TRL have in common: the other arms' numbers in TRL's words."""

from __future__ import annotations

from typing import Any


def settings(place: str, steps: int, batch: int, lr: float) -> dict[str, Any]:
    """Float32, AdamW (fused), constant learning rate, one log line per step, nothing recomputed, saved or reported."""
    return {
        "output_dir": place,
        "max_steps": steps,
        "per_device_train_batch_size": batch,
        "learning_rate": lr,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "adam_epsilon": 1e-8,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "activation_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def losses(trainer: Any) -> list[float]:
    """Of every step."""
    return [float(line["loss"]) for line in trainer.state.log_history if "loss" in line]
