"""Every demo recipe learns what its first lines say, on several seeds: real runs, read from their metrics.jsonl."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from runner.cli.job_builder import compose_job
from runner.core.errors import SpecError
from runner.core.package import recipes_dir

ROOT = Path(__file__).resolve().parents[2]


class Claim(NamedTuple):
    """At the first step `metric` is between `low` and `high`; in the end it is at most `most`, if that is given, and
    `result` is at least `least`."""

    metric: str
    low: float
    high: float
    result: str
    least: float
    most: float | None = None


def climbs(least: float, most_at_first: float = 0.45) -> Claim:
    """From what the supervised start leaves to do."""
    return Claim("reward/mean", 0.05, most_at_first, "reward/mean", least)


# Wide of what the recipes promise, so that neither a seed nor another machine's rounding decides.
DEMOS: dict[str, Claim] = {
    "sft_demo": Claim("train/loss", 4.0, 9.0, "eval/exact_match", 0.85),
    "vision_demo": Claim("train/loss", 4.0, 9.0, "eval/exact_match", 0.9),
    "vision_grpo_demo": Claim("reward/mean", 0.02, 0.7, "reward/mean", 0.55),
    "rm_demo": Claim("train/accuracy", 0.2, 0.75, "eval/accuracy", 0.9),
    "dpo_demo": Claim("train/accuracy", 0.0, 0.75, "eval/accuracy", 0.9),
    "grpo_demo": climbs(0.65),
    "grpo_demo algorithm.lag=2 algorithm.correction=decoupled": climbs(0.5),
    "grpo_demo algorithm.lag=1 sampler.interruptible=true": climbs(0.6),
    "ppo_demo": climbs(0.55),
    "tool_demo": climbs(0.55, most_at_first=0.55),
    "agent_demo": climbs(0.7, most_at_first=0.7),
    "distill_demo": Claim("distill/reverse_kl", 0.6, 1.5, "eval/exact_match", 0.85, most=0.45),
}
OVER = 5  # steps whose mean is the result; of an evaluation it is the last one


def ran(words: Sequence[str], folder: Path) -> list[Mapping[str, float]]:
    """The lines of metrics.jsonl of `run +recipe=…`."""
    done = subprocess.run(
        [sys.executable, "-m", "runner", *words, "tracker=none"],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return records(folder / "outputs" / "latest" / "metrics.jsonl")


def records(path: Path) -> list[Any]:
    """The lines of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def in_the_end(lines: Sequence[Mapping[str, float]], metric: str) -> float:
    """The last evaluation's value, or the mean of a metric of steps over the last ones."""
    curve = [line[metric] for line in lines if metric in line]
    return curve[-1] if metric.startswith("eval/") else sum(curve[-OVER:]) / OVER


def test_every_demo_is_held_to_something() -> None:
    recipes = {path.stem for path in recipes_dir().glob("*_demo.yaml")}
    assert recipes == {words.split()[0] for words in DEMOS} | {"tinker_demo"}  # tests/tinker/test_sdk.py has that one


def test_samples_of_several_updates_ago_need_their_correction(workdir: Path) -> None:
    with pytest.raises(SpecError, match=r"algorithm\.lag: 2 needs algorithm\.correction=decoupled"):
        compose_job(["+recipe=grpo_demo", "algorithm.lag=2"])
    compose_job(["+recipe=grpo_demo", "algorithm.lag=2", "algorithm.correction=decoupled"])


@pytest.mark.slow
def test_a_sum_says_what_its_parts_gave_and_episodes_have_no_held_out_loss(tmp_path: Path) -> None:
    small = (
        "init_from=null model.hidden_size=32 model.intermediate_size=48 model.layers=2 data.items=64 data.held_out=8"
    )
    short = "steps=2 evaluation.every=1 algorithm.batch_size=4 algorithm.group_size=2 sampler.max_new_tokens=4"
    parts = "reward.parts=[{name:exact},{name:length,target:4,weight:0.5}]"
    lines = ran(["+recipe=tool_demo", *small.split(), *short.split(), "reward=sum", parts], tmp_path)
    for line in lines[1:]:
        assert line["eval/exact_match"] == 0 and "eval/loss" not in line
        assert line["reward/mean"] == pytest.approx(line["reward/exact"] + 0.5 * line["reward/length"])
        assert line["reward/exact"] == 0 >= line["reward/length"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_rewards_rise_over_a_quantized_base_that_a_sampler_shares(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    words = "+recipe=grpo_demo adapter=lora model.quantization=nf4 launch.samplers=1 optimizer.lr=3e-3 steps=40"
    lines = ran([*words.split(), "evaluation.every=0", "checkpoint.every=0", "checkpoint.best=null"], tmp_path)
    rewards = [line["reward/mean"] for line in lines]
    assert sum(rewards[-OVER:]) > sum(rewards[:OVER]) + 0.03 * OVER
    assert max(line["weight_sync/logprob_error"] for line in lines) < 1e-3  # the sampler has the same codes


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("demo", DEMOS)
def test_a_demo_learns(demo: str, seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begin, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    lines = ran([*f"+recipe={demo}".split(), f"seed={seed}"], tmp_path)
    cpu_s = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    claim = DEMOS[demo]
    first, last = lines[0][claim.metric], in_the_end(lines, claim.result)
    left = in_the_end(lines, claim.metric)
    took = f"{time.monotonic() - begin:.0f} s, {cpu_s:.0f} s of them on a core"
    with capsys.disabled():
        print(f"\n{demo} seed={seed}: {claim.metric} {first:.3f} → {left:.3f}, {claim.result} {last:.3f}; {took}")
    assert claim.low <= first <= claim.high and last >= claim.least
    assert claim.most is None or left <= claim.most
    if demo == "tool_demo":
        kept = records(tmp_path / "outputs" / "latest" / "samples.jsonl")
        assert any(row["turns"][-1]["role"] == "tool" for row in kept[-8:] if "turns" in row)
