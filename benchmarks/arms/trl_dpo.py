"""TRL's DPOTrainer on the same pairs; runs in a venv of its own.

python -m arms.trl_dpo TASK WORKLOAD RESULT STEPS BATCH LR
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer, Qwen2ForCausalLM
from trl import DPOConfig, DPOTrainer

from arms import stamps, trl_common

LORA = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def main(task: str, folder: Path, result: Path, steps: int, batch: int, lr: float) -> None:
    """Train and write the result."""
    clock = stamps.Stamps().watch()
    pairs = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    with tempfile.TemporaryDirectory(prefix="benchmark-") as place:
        trainer = DPOTrainer(
            model=Qwen2ForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
            args=DPOConfig(
                **trl_common.settings(place, steps, batch, lr), max_length=None, train_sampling_strategy="sequential"
            ),
            train_dataset=Dataset.from_list(pairs),
            processing_class=AutoTokenizer.from_pretrained(folder / "model"),
            peft_config=LORA if task == "dpo lora" else None,
        )
        trainer.train()
    stamps.write(result, clock, trl_common.losses(trainer))


if __name__ == "__main__":
    chosen, source, target_file, count, size, rate = sys.argv[1:]
    main(chosen, Path(source), Path(target_file), int(count), int(size), float(rate))
