"""What `run plan` says against what an allocator counts: the simulated NPU's, in real steps of the same job.

    python benchmarks/plan.py [CASE …]   these cases, or every one, one after the other; exit code 1 if one is outside

Two limits: the counted peak is within 15 % of the planned tensors, and below the upper end of the band. The simulated
kernels need memory of their own inside an operator, as real ones do; the allocator counts it, the plan does not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

LIMIT = 0.15
SMALL = (
    "+recipe=sft_demo",
    "device=npu_sim",
    "model.hidden_size=256",
    "model.intermediate_size=768",
    "model.vocab_size=4096",
    "model.layers=8",
    "data=file",
    "data.max_length=128",
    "algorithm.batch_size=64",
    "algorithm.micro_batch_tokens=2048",
    "steps=3",
    "schedule.warmup_steps=1",
    "tracker=none",
)
QUIET = ("checkpoint.every=0", "checkpoint.export=false", "evaluation.every=0", "checkpoint.best=null")
TWO = ("launch.devices=2", "device.cards=2")
EXPERTS = ("model=tiny_moe", "model.experts=4")
CASES = {
    "full": (),
    "full, recomputing": ("model.gradient_checkpointing=true",),
    "full, every other layer": ("model.gradient_checkpointing=2",),
    "full, selective": ("model.gradient_checkpointing=selective",),
    "full, offloading": ("model.gradient_checkpointing=true", "model.activation_offloading=true"),
    "full, no fused operators": ("device.fused_ops=[]",),
    "LoRA": ("adapter=lora",),
    "LoRA, recomputing": ("adapter=lora", "model.gradient_checkpointing=true"),
    "full, sharded over 2": ("parallelism=fsdp", *TWO),
    "LoRA, sharded over 2": ("adapter=lora", "parallelism=fsdp", *TWO),
    "full, in slices over 2": ("parallelism=tp", *TWO),
    "full, rows over 2": ("parallelism=cp", *TWO),
    "full, rows over 2, ring": ("parallelism=cp", "parallelism.cp_backend=ring", *TWO),
    "full, stages over 2": ("parallelism=pp", *TWO),
    "full, 2 runs in each of 2 stages": ("parallelism=pp", "parallelism.pp_virtual_stages=2", *TWO),
    "full, recomputing, stages over 2": ("parallelism=pp", "model.gradient_checkpointing=true", *TWO),
    "experts": EXPERTS,
    "experts over 2": (*EXPERTS, "parallelism=ep", *TWO),
}


def main(names: Sequence[str] = ()) -> int:
    """Compare the cases of these names, or all; returns the exit code."""
    cases = {name: words for name, words in CASES.items() if not names or name in names}
    with TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"  # plain text: every token is trained on, as a plan takes it
        rows.write_text("".join(json.dumps({"text": f"{n:5d} " * 20}) + "\n" for n in range(1024)))
        return compare(f"data.path={rows}", cases)


def compare(data: str, cases: Mapping[str, Sequence[str]]) -> int:
    """Print a line for each case on these rows; returns the exit code."""
    print(f"{'case':36s}{'counted':>12s}{'planned':>12s}{'ratio':>8s}   MiB a rank")
    outside = 0
    for name, words in cases.items():
        counted, plan = peak((data, *words)), planned((data, *words))
        ratio = plan["peak_bytes"] / counted
        inside = abs(ratio - 1) <= LIMIT and counted <= plan["band_bytes"][1]
        outside += not inside
        figures = f"{counted / 2**20:12.1f}{plan['peak_bytes'] / 2**20:12.1f}{ratio:8.2f}"
        print(f"{name:36s}{figures}{'' if inside else '   outside'}", flush=True)
    return int(bool(outside))


def peak(words: tuple[str, ...]) -> float:
    """The most bytes that the allocator of any rank had given out in the last step of a run."""
    with TemporaryDirectory() as folder:
        run(*SMALL, *QUIET, *words, "--folder", f"{folder}/run")
        last = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()[-1]
    return float(json.loads(last)["perf/peak_memory_bytes"])


def planned(words: tuple[str, ...]) -> dict[str, object]:
    """The plan of the same job."""
    return dict(json.loads(run("plan", *SMALL, *words, "--json")))


def run(*words: str) -> str:
    """The output of a command; what went wrong is shown, and ends the benchmark."""
    done = subprocess.run(
        [sys.executable, "-m", "runner", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        sys.exit(f"run {' '.join(words)}\n{done.stderr[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
