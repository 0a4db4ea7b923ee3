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

from arms import stamps, trl_common, workload


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
            args=SFTConfig(
                **trl_common.settings(place, steps, batch, lr), max_length=None, train_sampling_strategy="sequential"
            ),
            train_dataset=data,
            processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        )
        trainer.train()
    stamps.write(result, clock, trl_common.losses(trainer))


if __name__ == "__main__":
    source, target_file, count, size, rate = sys.argv[1:]
    main(Path(source), Path(target_file), int(count), int(size), float(rate))
