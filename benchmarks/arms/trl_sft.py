"""TRL's SFTTrainer on the same tokens, in float32, without gradient checkpointing; runs in a venv of its own.

python -m arms.trl_sft WORKLOAD RESULT STEPS BATCH LR
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoTokenizer, Qwen2ForCausalLM
from trl import SFTConfig, SFTTrainer

from arms import stamps, workload


def _settings(place: str, steps: int, batch: int, lr: float) -> SFTConfig:
    """The other arms' numbers in TRL's words."""
    return SFTConfig(
        output_dir=place,
        max_steps=steps,
        per_device_train_batch_size=batch,
        learning_rate=lr,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_epsilon=1e-8,
        weight_decay=0.0,
        max_grad_norm=1.0,
        activation_checkpointing=False,
        bf16=False,
        use_cpu=True,
        max_length=None,
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def main(folder: Path, result: Path, steps: int, batch: int, lr: float) -> None:
    """Train and write the result."""
    clock = stamps.Stamps()
    clock.imported()
    clock.watch()
    rows = workload.read(folder)
    data = Dataset.from_dict({"input_ids": rows.ids, "assistant_masks": rows.mask})
    model = Qwen2ForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as place:
        trainer = SFTTrainer(
            model=model,
            args=_settings(place, steps, batch, lr),
            train_dataset=data,
            processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        )
        trainer.train()
    losses = [float(line["loss"]) for line in trainer.state.log_history if "loss" in line]
    stamps.write(result, clock, losses)


if __name__ == "__main__":
    source, target_file, count, size, rate = sys.argv[1:]
    main(Path(source), Path(target_file), int(count), int(size), float(rate))
