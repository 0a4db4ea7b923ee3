"""TRL's GRPOTrainer on the same prompts, with the same reward; runs in a venv of its own.

python -m arms.trl_grpo TASK PAGED WORKLOAD RESULT STEPS BATCH LR
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from arms import preferences, stamps, trl_common

# Sizes that it would take from a GPU's memory.
PAGES = {"num_blocks": 512, "page_size": 32, "max_batch_tokens": 2048}


def settings(how: preferences.Rollouts, paged: bool, place: str, steps: int, lr: float) -> GRPOConfig:
    """One update per step on all of its answers."""
    more = {"use_transformers_continuous_batching": True, "transformers_continuous_batching_config": PAGES}
    return GRPOConfig(
        **trl_common.settings(place, steps, how.answers, lr),
        num_generations=how.group,
        max_completion_length=how.new,
        temperature=1.0,
        shuffle_dataset=False,
        **(more if paged else {}),
    )


def reward_of(file: Path) -> Any:
    """The function that the runner is given, too."""
    spec = importlib.util.spec_from_file_location("reward", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.score


def main(task: str, paged: bool, folder: Path, result: Path, steps: int, lr: float) -> None:
    """Train and write the result."""
    clock, how = stamps.Stamps().watch(), preferences.GRPO[task]
    prompts = [json.loads(line) for line in (folder / how.data).read_text().splitlines()]
    clock.lap("sampling", GRPOTrainer, "_generate")
    clock.lap("scoring", GRPOTrainer, "_calculate_rewards")
    with tempfile.TemporaryDirectory(prefix="benchmark-") as place:
        trainer = GRPOTrainer(
            model=Qwen2ForCausalLM.from_pretrained(folder / how.model, dtype=torch.float32),
            reward_funcs=reward_of(folder / "reward.py"),
            args=settings(how, paged, place, steps, lr),
            train_dataset=Dataset.from_list(prompts),
            processing_class=AutoTokenizer.from_pretrained(folder / how.model),
        )
        trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    tokens = [line["completions/mean_length"] * how.answers for line in lines]
    rewards = [line["reward"] for line in lines]
    stamps.write(result, clock, trl_common.losses(trainer), tokens=tokens, rewards=rewards)


if __name__ == "__main__":
    chosen, way, source, target_file, count, _, rate = sys.argv[1:]
    main(chosen, way == "paged", Path(source), Path(target_file), int(count), float(rate))
