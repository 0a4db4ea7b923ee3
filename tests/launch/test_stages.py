"""Where a job's first weights come from: runs, exports, and recipes that are run first."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from runner.cli.compose import compose_job
from runner.errors import SpecError
from runner.launch.stage import go_on
from runner.launch.stages import StageFailed, with_first_weights

SMALL = ("model.hidden_size=32", "model.intermediate_size=48", "model.layers=2", "tracker=none", "steps=2")


def run(cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "runner", *words], cwd=cwd, capture_output=True, text=True, check=False
    )


def test_a_recipe_is_run_first_on_this_jobs_model(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        "+recipe=grpo_demo",
        *SMALL,
        "data.items=64",
        "data.held_out=8",
        "algorithm.batch_size=4",
        "algorithm.group_size=2",
        "evaluation.every=0",
        "init_from=recipe:quick",
        "device.threads=2",
        f"--config-dir={_with_recipe(tmp_path)}",
    )
    assert done.returncode == 0, done.stderr
    assert "init_from: running +recipe=quick first" in done.stderr
    said = [done.stdout.count(f"\n{word}  ") for word in ("done", "try it", "go on")]
    assert said == [2, 1, 1], "what to type next is said of the job alone"
    spec = (tmp_path / "outputs/latest/spec.yaml").read_text()
    [stage] = [p for p in (tmp_path / "outputs").glob("*/*-quick-*")]
    assert f"init_from: {stage.resolve()}/export" in spec
    first = (stage / "spec.yaml").read_text()
    assert "hidden_size: 32" in first, "the first run has this job's model"
    assert "threads: 2" in first, "and its device as it is set"
    assert json.loads((stage / "status.json").read_text())["state"] == "done"


def _with_recipe(folder: Path) -> Path:
    conf = folder / "mine"
    (conf / "recipe").mkdir(parents=True)
    text = (
        "# @package _global_\ndefaults:\n  - override /algorithm: sft\nname: quick\nsteps: 2\nevaluation:\n  every: 0\n"
    )
    (folder / "recipes").mkdir()
    (folder / "recipes" / "quick.yaml").write_text(text)
    return conf


def test_the_weights_of_an_export_are_the_first_ones(tmp_path: Path) -> None:
    first = run(tmp_path, "+recipe=sft_demo", *SMALL, "evaluation.every=0", "data.items=64", "data.held_out=8")
    assert first.returncode == 0, first.stderr
    export = (tmp_path / "outputs/latest/export").resolve()
    words = ("+recipe=sft_demo", *SMALL, "optimizer.lr=1e-30", "evaluation.every=0", "data.items=64")
    again = run(tmp_path, *words, "data.held_out=8", "init_from=outputs/latest", "seed=5")
    assert again.returncode == 0, again.stderr
    one, two = (load_file(p / "model.safetensors") for p in (export, tmp_path / "outputs/latest/export"))
    assert one.keys() == two.keys() and all(torch.allclose(one[n], two[n], atol=1e-7) for n in one)


@pytest.mark.parametrize("what", ["nothing", "empty", "adapter"])
def test_a_folder_without_weights_is_named(tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "there"
    if what != "nothing":
        folder.mkdir()
    if what == "adapter":
        (folder / "adapter_config.json").write_text("{}")
    spec = compose_job(["+recipe=sft_demo", f"init_from={folder}"]).spec
    with pytest.raises(SpecError, match="is an adapter" if what == "adapter" else "no weights in"):
        with_first_weights(spec)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    save_file({"model.embed_tokens.weight": torch.zeros(3, 3)}, tmp_path / "model.safetensors")
    done = run(tmp_path, "+recipe=sft_demo", *SMALL, f"init_from={tmp_path}")
    assert done.returncode == 2
    assert "model.embed_tokens.weight has no place in this model" in done.stderr


def test_a_recipe_that_fails_ends_this_job_with_its_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "wrong.yaml").write_text("# @package _global_\nstepz: 2\n")
    spec = compose_job(["+recipe=sft_demo", "init_from=recipe:wrong"]).spec
    with pytest.raises(StageFailed, match="ended with exit code 2") as caught:
        with_first_weights(spec)
    assert caught.value.exit_code == 2 and not (tmp_path / "outputs").exists()


def test_recipes_that_are_nowhere_are_named_before_any_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["+recipe=distill_demo", "algorithm.teacher=recipe:sft_dmo"]
    with pytest.raises(SpecError) as caught:
        compose_job(words)
    [problem] = caught.value.problems
    assert (problem.key, problem.origin) == ("algorithm.teacher", "command line")
    assert problem.message.startswith("no recipe named 'sft_dmo'; did you mean 'sft_demo'?")
    with pytest.raises(SpecError, match="init_from: no recipe named 'mine'"):
        compose_job([*words[:1], "init_from=recipe:mine"])
    (tmp_path / "conf" / "recipe").mkdir(parents=True)
    (tmp_path / "conf" / "recipe" / "mine.yaml").write_text("# @package _global_\nsteps: 2\n")
    assert compose_job([*words[:1], "init_from=recipe:mine"]).spec.init_from == "recipe:mine"


@pytest.mark.slow
def test_a_recipe_that_is_run_first_ends_with_its_job(tmp_path: Path) -> None:
    words = ["+recipe=grpo_demo", *SMALL[:-1], "init_from=recipe:sft_demo", "steps=2"]
    job = subprocess.Popen([sys.executable, "-m", "runner", *words], cwd=tmp_path, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 90
    while not (found := list(tmp_path.glob("outputs/*/*/metrics.jsonl"))):
        assert time.monotonic() < end and job.poll() is None
        time.sleep(0.05)
    job.kill()
    job.wait()
    status = found[0].parent / "status.json"
    while json.loads(status.read_text())["state"] == "running":
        assert time.monotonic() < end, "the first run outlived its job"
        time.sleep(0.05)
    assert json.loads(status.read_text())["state"] == "interrupted"  # by the kernel's SIGTERM, and it saved


def test_an_interrupted_stage_tells_how_its_job_goes_on(tmp_path: Path) -> None:
    words = ["+recipe=grpo_demo", *SMALL, "init_from=recipe:sft_demo", "evaluation.every=0", "name=ab"]
    job = subprocess.Popen(
        [sys.executable, "-m", "runner", *words], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip
    end = time.monotonic() + 90
    while not (found := [p for p in tmp_path.glob("outputs/*/*/metrics.jsonl") if p.stat().st_size]):
        assert time.monotonic() < end and job.poll() is None
        time.sleep(0.05)
    os.killpg(job.pid, signal.SIGINT)  # as a terminal does
    said = job.communicate(timeout=60)[0]
    stage = found[0].parent.relative_to(tmp_path)
    typed = "run +recipe=grpo_demo " + " ".join(SMALL)
    assert job.returncode == 130 and "run resume latest" not in said
    assert said.endswith(
        "while running +recipe=sft_demo first; this job was not begun\n"
        f"go on    {typed} init_from=recipe:sft_demo evaluation.every=0 name=ab     (runs +recipe=sft_demo anew)\n"
        f"or       run resume {stage} && {typed} evaluation.every=0 name=ab init_from={stage}\n"
    )
    assert json.loads((tmp_path / stage / "status.json").read_text())["state"] == "interrupted"


@pytest.mark.parametrize("first", [None, Path("outputs/x")])
def test_an_interrupted_stage_of_a_stage_says_nothing_of_its_own(
    first: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert go_on("one", first, {"init_from": "x"}, ["steps=2"]).count("\n") == (1 if first is None else 2)
    monkeypatch.setenv("RUNNER_STAGE", "1")
    assert go_on("one", first, {"init_from": "x"}, ["steps=2"]) == ""
