"""This runner, through its command line: what `python -m runner …` does, in a process with a clock.

python -m arms.runner_cli WORKLOAD RESULT STEPS BATCH LR
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
from pathlib import Path

from arms import stamps


def command(folder: Path, steps: int, batch: int, lr: float) -> list[str]:
    """What a user would type for this comparison."""
    return [
        "algorithm=sft",
        "data=file",
        f"data.path={folder / 'conversations.jsonl'}",
        "data.shuffle=false",
        "model=hf",
        f"model.path={folder / 'model'}",
        "adapter=none",
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


def main(folder: Path, result: Path, steps: int, batch: int, lr: float) -> None:
    """Train in a folder of its own and write the result."""
    clock = stamps.Stamps().watch()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as place:
        os.chdir(place)
        sys.argv = ["runner", *command(folder, steps, batch, lr)]
        try:
            runpy.run_module("runner", run_name="__main__", alter_sys=True)
        except SystemExit as end:
            if end.code:
                raise
        lines = (Path(place) / "outputs" / "latest" / "metrics.jsonl").read_text().splitlines()
        stamps.write(result, clock, [json.loads(line)["train/loss"] for line in lines])


if __name__ == "__main__":
    source, target_file, count, size, rate = sys.argv[1:]
    main(Path(source), Path(target_file), int(count), int(size), float(rate))
