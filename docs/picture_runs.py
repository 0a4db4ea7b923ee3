"""Runs the jobs whose measurements docs/make_pictures.py draws; its `--run NAME` calls this."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import yaml

from runner.spec.evaluation import HIGH, LOW
from runner.tools.report.run_facts import read_metrics

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.command import Command, run  # noqa: E402
from tests.stories import STORY_PAGES, play, wait_for_address  # noqa: E402

KEPT = (
    "train/loss",
    "train/accuracy",
    "train/grad_norm",
    "train/lr",
    "reward/mean",
    "reward/margin",
    "policy/entropy",
    "policy/chosen_logprob",
    "policy/rejected_logprob",
)
KEPT_BOUNDED = ("eval/loss", "eval/exact_match", "eval/length")
LAG = (
    "+recipe=grpo_demo init_from=null reward=rehearsal steps=5 evaluation.every=0 algorithm.batch_size=16 tracker=none"
)


def kept_curves(folder: Path) -> dict[str, Any]:
    """The metrics of a run that pictures show, as [step, value] in four digits."""
    names = {*KEPT, *(name + end for name in KEPT_BOUNDED for end in ("", LOW, HIGH))}
    found = read_metrics(folder / "metrics.jsonl")
    return {
        name: [[step, float(f"{value:.4g}")] for step, value in series.downsample(60).points]
        for name, series in found.items()
        if name in names
    }


def run_story(name: str, folder: Path) -> dict[str, Any]:
    """Play a story; the curves of its runs by their names, those of a sweep's jobs by what varies."""
    for typed, printed in play(STORY_PAGES / f"{name}.md", folder):
        print(f"$ {typed.line}\n{printed}", flush=True)
    runs = {
        path.parent.name.split("-")[1]: kept_curves(path.parent) for path in folder.glob("outputs/2*/*/metrics.jsonl")
    }
    for path in sorted(folder.glob("outputs/sweeps/*/0*/metrics.jsonl")):
        spec = yaml.safe_load((path.parent / "spec.yaml").read_text(encoding="utf-8"))
        runs[f"lr={spec['optimizer']['lr']:g} seed={spec['seed']}"] = kept_curves(path.parent)
    return runs


def run_serve(folder: Path) -> dict[str, Any]:
    """The story; then eight requests at once, of which the server computes two at a time."""
    run_story("serve", folder)
    return {"requests": request_times(folder)}


def request_times(folder: Path) -> list[list[float]]:
    """Eight requests at once to the newest run's server: start, first token and end of each, in seconds."""
    (folder / "more.log").touch()
    server = Command("serve", "latest", "port=0", "max_num_seqs=2", cwd=folder, printed=folder / "more.log")
    url = re.findall(r"http://\S+(?=/v1)", wait_for_address(server))[0]
    begin = time.monotonic()

    def ask(number: int) -> list[float]:
        body = {"model": model, "prompt": f"What does animal {number} say?", "max_tokens": 48, "ignore_eos": True}
        request = Request(f"{url}/v1/completions", json.dumps(body | {"stream": True, "temperature": 0}).encode())
        request.add_header("Content-Type", "application/json")
        start = time.monotonic() - begin
        with urlopen(request) as answer:
            answer.readline()
            first = time.monotonic() - begin
            answer.read()
        return [round(moment, 3) for moment in (start, first, time.monotonic() - begin)]

    try:
        model = json.loads(urlopen(f"{url}/v1/models").read())["data"][0]["id"]
        ask(0)
        begin = time.monotonic()
        with ThreadPoolExecutor(8) as pool:
            return sorted(pool.map(ask, range(8)), key=lambda one: one[1])
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(100)


def run_lag(folder: Path) -> dict[str, Any]:
    """[sample or train, step, start, end] in seconds, at lag 0 and 1."""
    spans: dict[str, Any] = {}
    for number in (0, 1):
        words = [*LAG.split(), f"algorithm.lag={number}"]
        subprocess.run([sys.executable, __file__, str(folder / "trace.json"), *words], cwd=folder, check=True)
        spans[str(number)] = json.loads((folder / "trace.json").read_text(encoding="utf-8"))
    return spans


def trace(path: Path, words: Sequence[str]) -> None:
    """Run a job, and write when it sampled and when it trained."""
    from runner.cli.main import main as run_command
    from runner.trainer import loop

    spans: list[tuple[str, int, float, float]] = []
    begin_queue, run_step = loop.ExperienceQueue.__init__, loop._run_step

    def init(self: Any, collect: Callable[[int], Any], *args: Any, **options: Any) -> None:
        def timed(step: int) -> Any:
            start = time.monotonic()
            experience = collect(step)
            spans.append(("sample", step + 1, start, time.monotonic()))
            return experience

        begin_queue(self, timed, *args, **options)

    def step_timed(job: Any, step: int) -> Any:
        end = run_step(job, step)
        now = time.monotonic()
        spans.append(("train", step + 1, now - end.values["time/update_s"], now))
        return end

    loop.ExperienceQueue.__init__, loop._run_step = init, step_timed  # type: ignore[method-assign]
    assert run_command([*words]) == 0
    first = min(start for *_, start, _ in spans)
    path.write_text(json.dumps([(what, step, round(a - first, 3), round(b - first, 3)) for what, step, a, b in spans]))


def run_alone(folder: Path, *words: str) -> Path:
    """Run a job in a process of its own; its run folder."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-m", "runner", *words, "tracker=none"], cwd=folder, check=True, env=environment)
    return folder / "outputs" / "latest"


def run_episode(folder: Path) -> list[dict[str, Any]]:
    """The messages of an episode whose reward is 1."""
    latest = run_alone(folder, "+recipe=agent_demo", "steps=2", "evaluation.at_start=false")
    rows = [json.loads(line) for line in (latest / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    row = next(row for row in rows if row["reward"] == 1 and "turns" in row)
    return [{"role": "user", "content": row["prompt"]}, *row["turns"]]


def run_demo(folder: Path) -> dict[str, Any]:
    """The curves of the demo."""
    return {"sft_demo": kept_curves(run_alone(folder, "+recipe=sft_demo"))}


def run_plan(folder: Path) -> dict[str, Any]:
    """What a card of sft_npu holds."""
    plan = json.loads(run("plan", "+recipe=sft_npu", "--json", cwd=folder))
    return {name: plan[name] for name in ("phases", "band_bytes", "card")}


RUNS: dict[str, Callable[[Path], Any]] = {
    **{name: partial(run_story, name) for name in ("sft", "dpo", "grpo", "sweep", "ascend")},
    "serve": run_serve, "demo": run_demo, "plan": run_plan, "lag": run_lag, "episode": run_episode,
}  # fmt: skip


if __name__ == "__main__":
    trace(Path(sys.argv[1]), sys.argv[2:])
