"""This runner, through its command line: what `python -m runner …` does, in a process with a clock.

python -m arms.runner_cli TASK [OVERRIDE …] WORKLOAD RESULT STEPS BATCH LR
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from arms import preferences, stamps


def common(steps: int, batch: int, lr: float) -> list[str]:
    """What a user would type for any of these comparisons."""
    return [
        "data=file",
        "data.shuffle=false",
        "model=hf",
        "optimizer=adamw",
        f"optimizer.lr={lr}",
        "optimizer.betas=[0.9,0.95]",
        "optimizer.clip_norm=1.0",
        "schedule=constant",
        f"steps={steps}",
        f"algorithm.batch_size={batch}",
        "device=cpu",
        f"device.threads={os.environ['OMP_NUM_THREADS']}",
        "evaluation.every=0",
        "checkpoint.every=0",
        "checkpoint.export=false",
        "tracker=none",
    ]


def task(name: str, folder: Path) -> list[str]:
    """What is typed beside: `sft`, `dpo`, `dpo lora`, or a way of `preferences.GRPO`."""
    if name in preferences.GRPO:
        return grpo(preferences.GRPO[name], folder)
    adapter = "adapter=lora" if name == "dpo lora" else "adapter=none"
    algorithm, _, _ = name.partition(" ")
    data = {"sft": "conversations.jsonl", "dpo": "pairs.jsonl"}[algorithm]
    return [f"algorithm={algorithm}", f"data.path={folder / data}", f"model.path={folder / 'model'}", adapter]


def grpo(how: preferences.Rollouts, folder: Path) -> list[str]:
    """As TRL does it by default: no KL, one update per step, groups without contrast kept."""
    return [
        "algorithm=grpo",
        "algorithm.zero_variance=keep",
        f"algorithm.group_size={how.group}",
        f"data.path={folder / how.data}",
        f"model.path={folder / how.model}",
        "adapter=none",
        "sampler=torch",
        f"sampler.max_new_tokens={how.new}",
        "reward=function",
        f"reward.path={folder / 'reward.py'}:score",
    ]


def run(typed: Sequence[str]) -> list[dict[str, Any]]:
    """`python -m runner` in this process and in a folder of its own; the lines of its metrics.jsonl."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as place:
        os.chdir(place)
        sys.argv = ["runner", *typed]
        try:
            runpy.run_module("runner", run_name="__main__", alter_sys=True)
        except SystemExit as end:
            if end.code:
                raise
        lines = (Path(place) / "outputs" / "latest" / "metrics.jsonl").read_text().splitlines()
        os.chdir("/")
    return [json.loads(line) for line in lines]


def main(name: str, overrides: Sequence[str], folder: Path, result: Path, steps: int, batch: int, lr: float) -> None:
    """Train and write the result."""
    clock = stamps.Stamps().watch()
    more = {}
    if name in preferences.GRPO:
        from runner.interfaces import GroupScorer
        from runner.sampler.torch import TorchSampler

        clock.lap("sampling", TorchSampler, "sample")
        clock.lap("scoring", GroupScorer, "score")
    lines = run([*common(steps, batch, lr), *task(name, folder), *overrides])
    if name in preferences.GRPO:
        kept = {"tokens": "rollout/tokens", "rewards": "reward/mean", "collect_s": "time/data_wait_s"}
        more = {key: [line[metric] for line in lines] for key, metric in kept.items()}
    stamps.write(result, clock, [line["train/loss"] for line in lines], **more)


if __name__ == "__main__":
    chosen, *typed, source, target_file, count, size, rate = sys.argv[1:]
    main(chosen, typed, Path(source), Path(target_file), int(count), int(size), float(rate))
