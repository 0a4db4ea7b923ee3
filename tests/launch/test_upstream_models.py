"""Where a job's first weights come from: runs, exports, and recipes that are run first."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from runner.cli.args import parse
from runner.cli.job_builder import compose_job, re_decode
from runner.cli.main import main
from runner.core.errors import SpecError
from runner.launch import upstream_runs
from runner.launch.upstream_runs import (
    UpstreamRunFailed,
    cache_folder,
    cache_key,
    command_words,
    continue_hint,
    layout_words,
    resolve_init_from,
    resolve_other_models,
)
from runner.spec.base import iter_leaves
from tests import command
from tests.inference.model_folders import write_adapter, write_base

SMALL = ("model.hidden_size=32", "model.intermediate_size=48", "model.layers=2", "tracker=none", "steps=2")


def run(cwd: Path, *words: str, code: int = 0) -> str:
    return command.run(*words, cwd=cwd, code=code)


def test_a_used_folder_is_refused_before_a_recipe_is_run_first(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (workdir / "papers").mkdir()
    (workdir / "papers" / "thesis.tex").write_text("mine")
    assert main(["+recipe=grpo_demo", "--folder", "papers"]) == 2
    said = capsys.readouterr()
    assert "papers is not empty (thesis.tex)" in said.err and "running +recipe" not in said.err
    assert [path.name for path in workdir.rglob("*")] == ["papers", "thesis.tex"]


@pytest.mark.slow
def test_a_recipe_is_run_first_on_this_jobs_model(tmp_path: Path) -> None:
    mine = _with_recipe(tmp_path)
    shutil.move(tmp_path / "recipes", mine / "recipes")
    said = run(
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
        f"--config-dir={mine}",
    )
    assert f"init_from: running +recipe=quick --config-dir {mine} first" in said
    counts = [said.count(f"\n{word}  ") for word in ("done", "try it", "continue")]
    assert counts == [2, 1, 1], "what to type next is said of the job alone"
    spec = (tmp_path / "outputs/latest/spec.yaml").read_text()
    [stage] = [path.parent for path in (tmp_path / "outputs").glob("stages/quick/*/spec.yaml")]
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


@pytest.mark.slow
def test_the_weights_of_an_export_are_the_first_ones(tmp_path: Path) -> None:
    run(tmp_path, "+recipe=sft_demo", *SMALL, "evaluation.every=0", "data.items=64", "data.held_out=8")
    export = (tmp_path / "outputs/latest/export").resolve()
    words = ("+recipe=sft_demo", *SMALL, "optimizer.lr=1e-30", "evaluation.every=0", "data.items=64")
    run(tmp_path, *words, "data.held_out=8", "init_from=outputs/latest", "seed=5")
    one, two = (load_file(p / "model.safetensors") for p in (export, tmp_path / "outputs/latest/export"))
    assert one.keys() == two.keys() and all(torch.allclose(one[n], two[n], atol=1e-7) for n in one)


@pytest.mark.parametrize("what", ["nothing", "empty"])
def test_a_folder_without_weights_is_named(tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "there"
    if what != "nothing":
        folder.mkdir()
    spec = compose_job(["+recipe=sft_demo", f"init_from={folder}"]).spec
    with pytest.raises(SpecError, match="no weights in"):
        resolve_init_from(spec)


def test_latest_is_the_export_of_the_newest_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_folder = tmp_path / "outputs" / "2026-01-01" / "a"
    (run_folder / "export").mkdir(parents=True)
    (run_folder / "spec.yaml").write_text("{}")
    (run_folder / "export" / "config.json").write_text("{}")
    save_file({"w": torch.zeros(3)}, run_folder / "export" / "model.safetensors")
    (tmp_path / "outputs" / "latest").symlink_to("2026-01-01/a")
    spec = compose_job(["+recipe=sft_demo", "init_from=latest"]).spec
    assert resolve_init_from(spec).init_from == str(run_folder / "export")


@pytest.mark.parametrize("text", ["a", "~/a"])
def test_an_export_that_is_older_than_the_runs_newest_checkpoint_is_said(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    write_base(tmp_path / "a" / "export")
    (tmp_path / "a" / "spec.yaml").touch()
    (tmp_path / "a" / "export" / "README.md").write_text("| step | 5 of 9 |\n")
    (tmp_path / "a" / "checkpoints" / "step-9").mkdir(parents=True)
    (tmp_path / "a" / "checkpoints" / "step-9" / "MANIFEST.json").touch()
    words = ["algorithm=distill", "model=tiny", "data=demo", f"init_from={text}", f"algorithm.teacher={text}"]
    spec = resolve_other_models(resolve_init_from(compose_job(words).spec))
    assert spec.init_from == spec.algorithm.upstream_models()["teacher"] == str(tmp_path / "a" / "export")
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in said] == ["init_from", "algorithm.teacher"]
    assert all("is read as its export of step 5, older than its newest checkpoint, 9" in line for line in said)


def test_an_adapter_needs_the_model_that_it_belongs_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    base = write_base(tmp_path / "base")
    adapter = write_adapter(tmp_path / "adapter", base)
    spec = compose_job(["+recipe=sft_demo", f"init_from={adapter}"]).spec
    with pytest.raises(SpecError, match=f"is an adapter, .*type model=hf model.path={base} adapter=lora"):
        resolve_init_from(spec)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    save_file({"model.embed_tokens.weight": torch.zeros(3, 3)}, tmp_path / "model.safetensors")
    said = run(tmp_path, "+recipe=sft_demo", *SMALL, f"init_from={tmp_path}", code=2)
    assert "model.embed_tokens.weight has shape [3, 3], but [" in said and "] in this model (model.safetensors)" in said
    (tmp_path / "model.safetensors").unlink()
    save_file({"model.nowhere": torch.zeros(3, 3)}, tmp_path / "model.safetensors")
    said = run(tmp_path, "+recipe=sft_demo", *SMALL, f"init_from={tmp_path}", code=2)
    assert "model.nowhere does not exist in this model" in said


def test_a_recipe_that_fails_ends_this_job_with_its_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "wrong.yaml").write_text("# @package _global_\nstepz: 2\n")
    spec = compose_job(["+recipe=sft_demo", "init_from=recipe:wrong"]).spec
    with pytest.raises(UpstreamRunFailed, match="failed with exit code 2") as caught:
        resolve_init_from(spec)
    assert caught.value.exit_code == 2 and not (tmp_path / "outputs").exists()


@pytest.mark.slow
def test_a_recipe_that_is_killed_ends_this_job_as_worth_a_retry(stages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(stages)
    monkeypatch.setenv("RUNNER_FAILPOINT", "checkpoint.before_rename:kill")
    spec = compose_job(["+recipe=sft_demo", *SMALL, "init_from=recipe:quick"]).spec
    with pytest.raises(UpstreamRunFailed, match=r"\+recipe=quick, .* was killed \(SIGKILL\)") as caught:
        resolve_init_from(spec)
    assert caught.value.exit_code == 75


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
    while not (found := list(tmp_path.glob("outputs/stages/*/*/metrics.jsonl"))):
        assert time.monotonic() < end and job.poll() is None
        time.sleep(0.05)
    job.kill()
    job.wait()
    status = found[0].parent / "status.json"
    while json.loads(status.read_text())["state"] == "running":
        assert time.monotonic() < end, "the first run outlived its job"
        time.sleep(0.05)
    assert json.loads(status.read_text())["state"] == "interrupted"  # by the kernel's SIGTERM, and it saved


@pytest.mark.slow
def test_an_interrupted_stage_tells_how_its_job_goes_on(tmp_path: Path) -> None:
    words = ["+recipe=grpo_demo", *SMALL, "init_from=recipe:sft_demo", "evaluation.every=0", "name=ab"]
    job = subprocess.Popen(
        [sys.executable, "-m", "runner", *words], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip
    end = time.monotonic() + 90
    while not (found := [p for p in tmp_path.glob("outputs/stages/*/*/metrics.jsonl") if p.stat().st_size]):
        assert time.monotonic() < end and job.poll() is None
        time.sleep(0.05)
    os.killpg(job.pid, signal.SIGINT)  # as a terminal does
    said = job.communicate(timeout=60)[0]
    typed = "run +recipe=grpo_demo " + " ".join(SMALL)
    assert job.returncode == 130 and "run resume latest" not in said
    assert said.endswith(
        "while running +recipe=sft_demo first; this job did not start\n"
        f"continue  {typed} init_from=recipe:sft_demo evaluation.every=0 name=ab     "
        "(+recipe=sft_demo continues where it stopped)\n"
    )
    status = json.loads((found[0].parent / "status.json").read_text())
    assert status["state"] == "interrupted"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "said", "words"),
    [
        pytest.param(signal.SIGTERM, 143, "this job did not start", (), id="terminated"),
        pytest.param(signal.SIGUSR2, 75, "a requeue continues", ("launch=slurm",), id="near-the-limit"),
    ],
)
def test_a_job_that_is_told_to_end_waits_for_its_stage_to_save(
    tmp_path: Path, number: int, code: int, said: str, words: tuple[str, ...]
) -> None:
    step = {"STEP_ID": "0", "NODEID": "0", "STEP_NODELIST": "here", "STEP_NUM_NODES": "1", "STEP_NUM_TASKS": "1"}
    slurm = {"SLURM_JOB_ID": "40", **{f"SLURM_{name}": value for name, value in step.items()}} if words else {}
    typed = ["+recipe=grpo_demo", *SMALL[:-1], "init_from=recipe:sft_demo", *words]
    job = subprocess.Popen(
        [sys.executable, "-m", "runner", *typed],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | slurm,
    )
    stage = wait_for(tmp_path, "outputs/stages/sft_demo/*/metrics.jsonl").parent
    job.send_signal(number)
    err = job.communicate(timeout=60)[1]
    assert job.returncode == code and said in err, err
    assert json.loads((stage / "status.json").read_text())["state"] == "interrupted"
    assert list(stage.glob("checkpoints/step-*/MANIFEST.json"))
    counted = tmp_path / "outputs" / ".slurm" / "40.stages"
    assert counted.read_text().split() == [str(stage)] if words else not counted.exists()


def test_an_interrupted_stage_of_a_stage_says_nothing_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert continue_hint("one", ["steps=2"]).count("\n") == 1
    monkeypatch.setenv("RUNNER_STAGE", "1")
    assert continue_hint("one", ["steps=2"]) == ""


@pytest.fixture
def stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a recipe `quick` and one, `second`, that begins with it."""
    monkeypatch.chdir(tmp_path)
    _with_recipe(tmp_path)
    text = (tmp_path / "recipes" / "quick.yaml").read_text()
    (tmp_path / "recipes" / "second.yaml").write_text(text + "init_from: recipe:quick\n")
    return tmp_path


def key(*more: str, recipe: str = "quick") -> str:
    spec = compose_job(["+recipe=sft_demo", *SMALL, *more]).data
    return cache_key(command_words(recipe, spec, own_model=False))


@pytest.mark.parametrize("key", ["init_from", "algorithm.teacher"])
def test_a_recipe_that_runs_first_is_composed_with_the_config_dir_of_the_job(
    stages: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def composed(words: Sequence[str]) -> dict[str, Any]:
        args = parse(words)
        return compose_job(args.words, args.config_dir).data

    (stages / "cluster/optimizer").mkdir(parents=True)
    (stages / "cluster/optimizer/adamw.yaml").write_text("defaults: [adamw, _self_]\nlr: 7.0e-4\n")
    shutil.move(stages / "recipes", stages / "cluster/recipes")
    words = [
        "data=demo",
        *SMALL,
        *(["algorithm=opd", "sampler=torch"] if key == "algorithm.teacher" else []),
        f"{key}=recipe:second",
    ]
    job = compose_job(words, Path("cluster"))
    again = stages / "spec.yaml"
    again.write_text(yaml.safe_dump(job.data))
    found = dict(iter_leaves(re_decode(again, []).data))[key]  # as a job of a sweep, or one that waited in Slurm
    assert found == f"recipe:second --config-dir {stages / 'cluster'}" == dict(iter_leaves(job.data))[key]
    recipe = found.removeprefix("recipe:")
    passed = command_words(recipe, job.data, own_model=False)
    first = composed(passed)
    assert (first["optimizer"]["lr"], first["init_from"]) == (7e-4, found.replace("second", "quick"))
    monkeypatch.setattr(upstream_runs, "_resolve_spec", composed)
    folder = cache_folder(recipe, passed)
    assert folder.parent == Path("outputs/stages/second")
    (stages / "cluster/optimizer/adamw.yaml").write_text("defaults: [adamw, _self_]\nlr: 8.0e-4\n")
    assert cache_folder(recipe, passed) != folder


def test_a_recipe_that_runs_first_trains_all_weights_of_a_quantized_base(stages: Path) -> None:
    words = ["+recipe=sft_demo", *SMALL, "adapter=lora", "model.quantization=int8"]
    passed = command_words("quick", compose_job(words).data, own_model=False)
    assert "model=tiny" in passed and compose_job(passed).data["model"]["quantization"] is None
    words = ["+recipe=grpo_demo", *SMALL, "model=tiny_moe", "model.router_replay=old", "algorithm.mini_batches=2"]
    passed = command_words("quick", compose_job(words).data, own_model=False)
    assert compose_job(passed).data["model"]["router_replay"] == "auto", "it samples nothing"


@pytest.mark.slow
def test_a_key_is_of_all_that_makes_the_weights_and_of_nothing_else(stages: Path) -> None:
    first = key()
    assert key("optimizer.lr=1", "name=other", "algorithm.batch_size=8") == first
    assert key("launch.devices=2", "parallelism=fsdp") == first, "on how many devices is no part of it"
    assert len({first, key("seed=2"), key("device.threads=2"), key(recipe="second")}) == 4
    nested = key(recipe="second")
    path = stages / "recipes" / "quick.yaml"
    path.write_text(path.read_text().replace("steps: 2", "steps: 3"))
    assert key() != first and key(recipe="second") != nested, "a stage of a stage counts"
    (stages / "d.jsonl").write_text('{"text": "one"}\n')
    path.write_text(
        path.read_text().replace("/algorithm: sft", "/algorithm: sft\n  - override /data: file")
        + "data:\n  path: d.jsonl\n"
    )
    with_file = key()
    spread = path.read_text().replace("/data: file", "/data: file\n  - override /parallelism: ddp")
    path.write_text(f"{spread}launch:\n  devices: 2\n")
    assert key() == with_file, "nor is what the recipe says of it"
    (stages / "d.jsonl").write_text('{"text": "another"}\n')
    assert key() != with_file, "files count with what is in them"


@pytest.mark.parametrize("is_part", [False, True])
def test_a_key_is_of_the_users_code_and_of_what_it_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_part: bool
) -> None:
    code, helper = tmp_path / "my_reward.py", tmp_path / "helper.py"
    one = {"name": "function", "path": f"{code}:score"}
    spec = {"reward": {"name": "sum", "parts": [one]} if is_part else one}
    monkeypatch.setattr(upstream_runs, "_resolve_spec", lambda words: spec)
    keys = []
    for file, text in ((code, "import helper"), (helper, "A = 1"), (helper, "A = 10"), (code, "import helper, os")):
        file.write_text(text)
        keys.append(cache_key([]))
    assert len({*keys}) == len(keys)


def wait_for(path: Path, pattern: str) -> Path:
    end = time.monotonic() + 60
    while not (found := [p for p in path.glob(pattern) if p.stat().st_size]):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found[0]


@pytest.mark.slow
def test_jobs_that_want_the_same_stage_share_it(stages: Path) -> None:
    """Two at once: one runs it, the other waits; a third, later, takes it; it is killed once and continues."""
    path = stages / "recipes" / "quick.yaml"
    path.write_text(path.read_text().replace("steps: 2", "steps: 12\ncheckpoint:\n  every: 1"))
    words = [
        "+recipe=sft_demo",
        *SMALL,
        "init_from=recipe:quick",
        "evaluation.every=0",
        "data.items=64",
        "data.held_out=8",
    ]
    typed = [sys.executable, "-m", "runner", *words]
    killed = subprocess.Popen(typed, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wait_for(stages, "outputs/stages/quick/*/checkpoints/step-*/MANIFEST.json")
    killed.kill()  # the stage gets the kernel's SIGTERM, and saves; until it has, nobody else may run it
    both = [subprocess.Popen(typed, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [job.communicate(timeout=120)[1] for job in both]
    assert [job.returncode for job in both] == [0, 0], said
    going_on = [line for text in said for line in text.splitlines() if "init_from: continuing +recipe=quick" in line]
    taken = [line for text in said for line in text.splitlines() if "with this spec and code" in line]
    assert len(going_on) == len(taken) == 1
    [stage] = stages.glob("outputs/stages/quick/*/spec.yaml")
    rows = [json.loads(line)["step"] for line in (stage.parent / "metrics.jsonl").read_text().splitlines()]
    assert rows == list(range(1, 13)), "every step once"
    third = run(stages, *words, "optimizer.lr=1e-5")
    assert f"with this spec and code (to run it again: rm -r {stage.parent.relative_to(stages)})" in third
    killed.communicate()


SPREAD = ("launch.devices=2", "parallelism=fsdp", "evaluation.every=0", "data.items=64", "data.held_out=8")


def ranks_of(stage: Path) -> int:
    """On how many ranks the newest attempt at a stage ran."""
    return len(json.loads((stage / "manifest.json").read_text())["ranks"])


@pytest.mark.slow
def test_a_stage_has_the_layout_of_its_job_and_is_the_same_under_any(stages: Path) -> None:
    """A rank of the stage is killed; the job typed again, now on one device, continues it there."""
    path = stages / "recipes" / "quick.yaml"
    path.write_text(path.read_text().replace("steps: 2", "steps: 300\ncheckpoint:\n  every: 5"))
    words = ("+recipe=sft_demo", *SMALL, "init_from=recipe:quick")
    typed = [sys.executable, "-m", "runner", *words, *SPREAD]
    job = subprocess.Popen(typed, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wait_for(stages, "outputs/stages/quick/*/checkpoints/step-*/MANIFEST.json")
    [stage] = [found.parent for found in stages.glob("outputs/stages/quick/*/manifest.json")]
    assert ranks_of(stage) == 2
    os.kill(json.loads((stage / "manifest.json").read_text())["ranks"][1]["pid"], signal.SIGKILL)
    said = job.communicate(timeout=60)[1]
    assert job.returncode == 75 and "rank 1 of 2 was killed (SIGKILL)" in said, said
    assert "+recipe=quick, which init_from needs, failed with exit code 75" in said
    kept = max(int(found.parent.name.removeprefix("step-")) for found in stage.glob("checkpoints/step-*/MANIFEST.json"))
    spec = stage / "spec.yaml"
    spec.write_text(spec.read_text().replace("steps: 300", f"steps: {kept + 2}"))
    again = run(stages, *words, "launch.devices=1", *SPREAD[2:])
    assert "init_from: continuing +recipe=quick" in again
    assert ranks_of(stage) == 1
    rows = [json.loads(line)["step"] for line in (stage / "metrics.jsonl").read_text().splitlines()]
    assert rows == list(range(1, kept + 3)), "every step once"


@pytest.mark.slow
def test_a_stage_of_several_ranks_is_taken_by_a_job_of_one(stages: Path) -> None:
    words = ("+recipe=sft_demo", *SMALL, "init_from=recipe:quick")
    run(stages, *words, *SPREAD)
    assert "with this spec and code" in run(stages, *words, *SPREAD[2:])
    [stage] = [found.parent for found in stages.glob("outputs/stages/quick/*/manifest.json")]
    assert ranks_of(stage) == 2 and ranks_of(stages / "outputs" / "latest") == 1


def test_a_stage_that_cannot_have_its_jobs_layout_says_so_and_runs_as_one_process(stages: Path) -> None:
    path = stages / "recipes" / "quick.yaml"
    text = path.read_text().replace("/algorithm: sft", "/algorithm: sft\n  - override /adapter: lora")
    path.write_text(f"{text}adapter:\n  dora: true\n")
    spec = compose_job(["+recipe=sft_demo", *SMALL, "launch.devices=2", "parallelism=tp"]).data
    layout, why_not = layout_words(command_words("quick", spec, own_model=False), spec)
    assert {"launch.devices=1", "parallelism=single"} <= {*layout} and "adapter.dora" in why_not
    path.write_text(path.read_text().replace("dora: true", "dora: false"))
    layout, why_not = layout_words(command_words("quick", spec, own_model=False), spec)
    assert {"launch.devices=2", "parallelism=tp"} <= {*layout} and not why_not
