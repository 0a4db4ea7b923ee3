"""Whole sweeps of real runs: slow, and what they must come to is what a user would look at."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runner.run_dir.folder import RunFolder
from runner.sweep.plan import find_sweep
from tests.small import JUDGED


def run(cwd: Path, *words: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "runner", *words], cwd=cwd, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def same_bytes(a: RunFolder, b: RunFolder) -> bool:
    files = [next((r.checkpoints).glob("step-00000006/policy.safetensors")) for r in (a, b)]
    return files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.slow
def test_a_sweep_of_real_runs_ends_in_an_answer(tmp_path: Path) -> None:
    words = [word for word in JUDGED if not word.startswith("tracker")]
    out = run(tmp_path, "-m", *words, "optimizer.lr=1e-3,1e-2", "seed=1,2", "sweep.metric=eval/loss")
    folder, plan = find_sweep(str(tmp_path / "outputs/sweeps/latest"))
    rows = list(csv.DictReader(folder.table.read_text().splitlines()))
    assert [row["state"] for row in rows] == ["done"] * 4 and len({row["folder"] for row in rows}) == 4
    results = json.loads(folder.results.read_text())
    values = [job["scores"]["eval/loss"]["value"] for job in results["jobs"]]
    assert results["best"] == values.index(min(values)) and min(values) < 5
    assert f"best     job {results['best']}" in out and "mean ± 95 % interval" in out
    sinks = [json.loads((folder.run(i).root / "wandb" / "sink.json").read_text()) for i in range(4)]
    assert len({sink["run_id"] for sink in sinks}) == 4 and {sink["run_group"] for sink in sinks} == {folder.root.name}
    assert [sink["name"] for sink in sinks][3] == "lr=0.01 seed=2"
    best = plan.jobs[results["best"]]
    again = out.partition("again    run ")[2].splitlines()[0].split()
    run(tmp_path, *again)  # the command that it says makes the same run
    assert same_bytes(RunFolder((tmp_path / "outputs/latest").resolve()), folder.run(best.index))
    assert "finished jobs" not in run(tmp_path, "sweep", "resume", str(folder.root))
    assert "run infer outputs/sweeps/" in folder.output(0).read_text()
    run(tmp_path, "report", str(folder.run(0).root))
    assert "optimizer.lr" in run(tmp_path, "diff", str(folder.run(0).root), str(folder.run(3).root))


@pytest.mark.slow
def test_a_killed_sweep_of_real_runs_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    words = ("-m", *JUDGED, "steps=60", "seed=1,2,3", "sweep.parallel=1")
    words = tuple(w for w in words if w != "steps=6")
    command = [sys.executable, "-m", "runner", *words]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 120
    while not list(tmp_path.glob("outputs/sweeps/2*/001/checkpoints/step-*/MANIFEST.json")):
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    out = run(tmp_path, "sweep", "resume", "latest")
    assert "1 done" in out and "now 2 to run" in out
    folder, plan = find_sweep(str(tmp_path / "outputs/sweeps/latest"))
    attempts = [json.loads(folder.run(i).status.read_text())["attempt"] for i in range(3)]
    assert attempts == [1, 2, 1]
    for index in range(3):
        lines = folder.run(index).metrics.read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == list(
            range(61)
        )  # 0: the evaluation before the first step
    run(tmp_path, *plan.jobs[1].words)
    alone = RunFolder((tmp_path / "outputs/latest").resolve())
    assert [f.read_bytes() for f in sorted(alone.checkpoints.glob("*/policy.safetensors"))][-1] == [
        f.read_bytes() for f in sorted(folder.run(1).checkpoints.glob("*/policy.safetensors"))
    ][-1]


REWARD = """
import os, signal, sys, time

def job():
    pid = os.getpid()
    while True:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().decode().split("\\0")
        if "--folder" in words:
            return pid, int(words[words.index("--folder") + 1][-3:])
        with open(f"/proc/{pid}/stat") as file:
            pid = int(file.read().rpartition(")")[2].split()[1])

def score(prompts, completions, **columns):
    pid, index = job()
    if index == 3:
        raise ValueError("no such reward")
    if index == 5:
        os.kill(pid, signal.SIGKILL)
    if index == 7:
        sys.exit(3)
    if index == 9:
        time.sleep(600)
    return [float(len(c)) for c in completions]
"""


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_twelve_real_jobs_of_which_four_misbehave(tmp_path: Path) -> None:
    (tmp_path / "rate.py").write_text(REWARD)
    small = [w for w in JUDGED if not w.startswith(("+recipe", "schedule", "algorithm"))]
    sampled = ["+recipe=grpo_demo", "init_from=null", "sampler.max_new_tokens=8", "algorithm.batch_size=4"]
    own = ["algorithm.group_size=4", "reward=function", "reward.path=rate.py:score", "reward.timeout_s=900"]
    sweep_own = ["sweep.parallel=2", "sweep.timeout_s=90", "sweep.grace_s=5", "sweep.metric=reward/mean"]
    out = run(tmp_path, "-m", *sampled, *small, *own, "seed=range(0,12)", *sweep_own, code=9)
    folder, _ = find_sweep(str(tmp_path / "outputs/sweeps/latest"))
    states = [row["state"] for row in csv.DictReader(folder.table.read_text().splitlines())]
    assert states == [
        "failed" if i in (3, 7) else "killed" if i == 5 else "timeout" if i == 9 else "done" for i in range(12)
    ]
    assert "4 of 12 jobs failed" in out and "12     " not in out
    for word in ("no such reward", "killed by SIGKILL", "not finished after 90 s", "--only 9"):
        assert word in out
    assert run(tmp_path, "sweep", "status", "latest").count(" done ") == 8
