"""A run as its user sees it: real processes, the folder they leave, resume, infer, export, signals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM

from runner.tracker.text import MACHINE_METRICS
from tests import command
from tests.small import JUDGED, UNJUDGED

DEADLINE_S = 200.0  # machines may be busy


def runner(cwd: Path, *arguments: str, code: int = 0, **environment: str) -> str:
    """Run the command line in `cwd`; returns what it printed and checks its exit code."""
    return command.run(*arguments, cwd=cwd, code=code, **environment)


def curve(run: Path) -> list[dict[str, float]]:
    """metrics.jsonl without what no two runs share."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(MACHINE_METRICS)} for row in rows]


def weights(run: Path, step: int) -> bytes:
    """The bytes of a checkpoint's parameters and optimizer state."""
    return (run / "checkpoints" / f"step-{step:08d}" / "policy.safetensors").read_bytes()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which one small run was made."""
    cwd = tmp_path_factory.mktemp("work")
    out = runner(cwd, *JUDGED)
    assert "eval/exact_match" in out and "run infer latest" in out
    assert [line[:10].rstrip() for line in out.splitlines()][-5:] == ["done", "report", "model", "try it", "continue"]
    return cwd


def test_the_folder_holds_what_it_should(finished: Path) -> None:
    run = (finished / "outputs/latest").resolve()
    rows = curve(run)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows if "eval/exact_match" in row] == [0, 3, 6]
    assert "train/loss" not in rows[0], "it is the evaluation before the first step"
    status = json.loads((run / "status.json").read_text())
    assert status["state"] == "done" and status["exit_code"] == 0
    assert "done · step 6/6" in (run / "report.html").read_text()
    assert [p.name for p in sorted((run / "checkpoints").glob("step-*"))][-1] == "step-00000006"
    manifest = json.loads((run / "manifest.json").read_text())
    assert "torch" in json.dumps(manifest) and (run / "run.log").stat().st_size > 0
    spec = yaml.safe_load((run / "spec.yaml").read_text())
    assert spec["steps"] == 6 and spec["optimizer"]["betas"], "defaults are filled in"


def test_the_spec_runs_again_by_itself_to_the_same_bits(finished: Path) -> None:
    first = (finished / "outputs/latest").resolve()
    again = finished / "again"
    again.mkdir()
    runner(again, "--spec", str(first / "spec.yaml"))
    second = (again / "outputs/latest").resolve()
    assert curve(second) == curve(first) and weights(second, 6) == weights(first, 6)


def test_the_export_loads_with_transformers_and_answers_as_infer_does(finished: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export = finished / "outputs/latest/export"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(export), AutoTokenizer.from_pretrained(export)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "sort 5031"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids = model.generate(**chat, max_new_tokens=6, do_sample=False)[0, chat["input_ids"].shape[1] :]
    answer = tokenizer.decode(ids, skip_special_tokens=True)
    shown = runner(finished, "infer", "latest", "device=cpu", "sort 5031", "--max-new-tokens", "6")
    assert answer.strip() in shown and "> " not in shown, "one prompt: device=cpu is none"


def test_resuming_a_finished_run_says_so(finished: Path) -> None:
    assert "finished after 6 steps" in runner(finished, "resume", "latest")


def test_a_resume_may_not_change_the_job(finished: Path) -> None:
    out = runner(finished, "resume", "latest", "optimizer.lr=1", "seed=4", code=2)
    assert "optimizer" in out and "seed" in out and "change in a resumed run" in out


@pytest.mark.slow
def test_an_export_of_an_earlier_checkpoint_leaves_the_last_one_alone(finished: Path) -> None:
    run = (finished / "outputs/latest").resolve()
    before = (run / "export/model.safetensors").read_bytes()
    runner(finished, "export", "latest", "--checkpoint", "4")
    assert (run / "export-step-4/model.safetensors").read_bytes() != before
    assert "| step | 4 of 6 |" in (run / "export-step-4/README.md").read_text()
    assert (run / "export/model.safetensors").read_bytes() == before
    assert "not an empty folder" in runner(finished, "export", "latest", "--out", str(run), code=2)


@pytest.mark.slow
def test_a_spec_edited_by_hand_is_refused_by_resume_and_infer(finished: Path) -> None:
    copy = finished / "edited"
    shutil.copytree((finished / "outputs/latest").resolve(), copy)
    text = (copy / "spec.yaml").read_text()
    (copy / "spec.yaml").write_text(text.replace("batch_size: 8", "batch_size: 16").replace("seed: 0", "seed: 1"))
    lines = (copy / "metrics.jsonl").read_bytes()
    out = runner(finished, "resume", "edited", "steps=8", code=2)
    assert "algorithm.batch_size: was 8 in the checkpoint, but is 16" in out and "seed: was 0" in out
    assert (copy / "metrics.jsonl").read_bytes() == lines
    assert "algorithm.batch_size" in runner(finished, "infer", "edited", "sort 31", code=2)


@pytest.mark.slow
def test_killed_after_the_last_checkpoint_with_files_damaged_it_is_still_finished_and_says_what_it_found(
    tmp_path: Path,
) -> None:
    small = [word for word in JUDGED if not word.startswith("checkpoint.every")]
    failpoint = {"RUNNER_FAILPOINT": "checkpoint.after_rename:kill"}
    runner(tmp_path, *small, "checkpoint.every=0", code=-signal.SIGKILL, **failpoint)
    run = (tmp_path / "outputs/latest").resolve()
    first = json.loads((run / "manifest.json").read_text())
    (run / "stacks.log").write_text("a stack of the first attempt\n")
    (run / "status.json").write_text('{"state": "run')
    rows = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(rows[:2] + rows[4:]))
    out = runner(tmp_path, "resume", "latest", "checkpoint.keep=5")
    assert "status.json cannot be read" in out and "is damaged: missing steps 2 to 3" in out
    assert "| eval/exact_match |" in (run / "export/README.md").read_text()
    kept = run / "attempts" / "2"
    assert json.loads((kept / "manifest.json").read_text()) == first
    assert json.loads((run / "manifest.json").read_text())["argv"][-1] == "checkpoint.keep=5"
    assert (kept / "stacks.log").read_text() == "a stack of the first attempt\n"
    assert yaml.safe_load((kept / "overrides.yaml").read_text()) == {"typed": ["checkpoint.keep=5"]}
    assert yaml.safe_load((kept / "spec.yaml").read_text())["checkpoint"]["keep"] == 2
    assert json.loads((run / "status.json").read_text())["attempt"] == 2


@pytest.mark.slow
def test_plain_text_is_gone_on_with_as_plain_text(tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": "abcabcabc"}) + "\n" for _ in range(8)))
    model = [word for word in JUDGED if word.startswith("model.")]
    words = ("algorithm=cpt", "data=file", "data.path=text.jsonl", "model=tiny", *model, "optimizer.lr=0.02")
    runner(tmp_path, *words, "steps=40", "algorithm.batch_size=4", "tracker=none", "evaluation.every=0")
    out = runner(tmp_path, "infer", "latest", "abcab", "--max-new-tokens", "4")
    assert "cabc" in out.splitlines() and "prompts are plain text" in out


IMPORTS_SLOWLY = """
import sys, time

class Slow:
    def find_spec(name, path, target=None):
        if name == "torch":
            time.sleep(250)

sys.meta_path.insert(0, Slow)
from runner.cli.main import main
sys.exit(main())
"""


def test_a_signal_during_the_build_is_obeyed_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", IMPORTS_SLOWLY, *JUDGED]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    log, deadline = tmp_path / "outputs/latest/run.log", time.monotonic() + DEADLINE_S
    while not (log.exists() and log.read_text()) and time.monotonic() < deadline:  # the first line: handled, no torch
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGTERM)
    printed = process.communicate(timeout=100)[0].decode()
    run = (tmp_path / "outputs/latest").resolve()
    assert process.returncode == 143 and "SIGTERM before the first step ended; no checkpoint was written" in printed
    assert printed.endswith("continue  run resume latest\n") and "error" not in printed
    assert json.loads((run / "status.json").read_text())["state"] == "interrupted"
    assert not (run / "checkpoints").exists() and not (run / "metrics.jsonl").exists()


def interrupted(cwd: Path, number: int, after: int, *arguments: str) -> tuple[int, Path]:
    """Start a run, send a signal once `after` steps are on record; returns its exit code and folder."""
    process = command.Command(*arguments, cwd=cwd, printed=cwd / "printed.txt", hold_at=after)
    metrics, deadline = cwd / "outputs/latest/metrics.jsonl", time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline and process.poll() is None:
        if metrics.exists() and metrics.read_text().count("\n") >= after:
            break
        time.sleep(0.01)
    process.send_signal(number)
    process.release()
    return process.wait(timeout=DEADLINE_S), (cwd / "outputs/latest").resolve()


LONGER = {"steps": 60, "checkpoint.every": 7, "evaluation.every": 60, "checkpoint.export": "false"}
LONG = (
    *(a for a in JUDGED if a.partition("=")[0] not in LONGER),
    *(f"{key}={value}" for key, value in LONGER.items()),
)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A longer run that nothing interrupted."""
    cwd = tmp_path_factory.mktemp("straight")
    runner(cwd, *LONG)
    return (cwd / "outputs/latest").resolve()


@pytest.mark.parametrize(
    ("number", "code"),
    [pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow), (signal.SIGINT, 130), (signal.SIGKILL, -9)],
)
def test_interrupted_and_resumed_is_the_same_run_bit_for_bit(
    tmp_path: Path, straight: Path, number: int, code: int
) -> None:
    returned, run = interrupted(tmp_path, number, 3, *LONG)
    assert returned == code
    out = runner(tmp_path, "resume", "latest")
    assert "resume" in out
    assert curve(run) == curve(straight) and weights(run, 60) == weights(straight, 60)


def checkpoints(run: Path) -> list[int]:
    return sorted(int(path.parent.name.removeprefix("step-")) for path in run.glob("checkpoints/step-*/MANIFEST.json"))


@pytest.mark.parametrize("more", [(), pytest.param(("launch.devices=2", "parallelism=ddp"), marks=pytest.mark.slow)])
def test_sigusr1_saves_and_continues_and_a_closed_terminal_ends_the_run_with_a_checkpoint(
    tmp_path: Path, more: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    words = (*UNJUDGED, "steps=100000", "checkpoint.every=0", "checkpoint.export=false", *more)
    process = command.Command(*words, cwd=tmp_path, printed=tmp_path / "printed.txt")
    request.addfinalizer(process.kill)
    run, deadline = tmp_path / "outputs/latest", time.monotonic() + DEADLINE_S

    def reached(steps: int) -> bool:
        """Whether the run has made so many steps more; waits for them."""
        metrics = run / "metrics.jsonl"
        wanted = (metrics.read_text().count("\n") if metrics.exists() else 0) + steps
        while not (metrics.exists() and metrics.read_text().count("\n") >= wanted) and process.poll() is None:
            assert time.monotonic() < deadline, process.said()
            time.sleep(0.01)
        return process.poll() is None

    assert reached(1), process.said()
    process.send_signal(signal.SIGUSR1)
    while not checkpoints(run) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(checkpoints(run)) == 1 and reached(2), process.said()
    for _ in range(3):  # the kernel's, and the shell's
        process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=DEADLINE_S) == 143, process.said()
    assert len(checkpoints(run)) == 2 and "a checkpoint was written" in process.said()


@pytest.mark.slow
def test_a_second_process_may_not_enter_a_running_job(tmp_path: Path) -> None:
    from runner.run_dir.folder import RunFolder, hold_lock

    runner(tmp_path, *JUDGED)
    lock = hold_lock(RunFolder((tmp_path / "outputs/latest").resolve()))
    try:
        assert "is running this job" in runner(tmp_path, "resume", "latest", "steps=8", code=2)
    finally:
        lock.release()
    out = runner(tmp_path, "resume", "latest", "steps=8")
    assert "after step 6 of 8" in out
    assert [r["step"] for r in curve((tmp_path / "outputs/latest").resolve())] == list(range(9))


def test_npu_without_a_card_exits_2_and_leaves_no_folder(tmp_path: Path) -> None:
    out = runner(tmp_path, "+recipe=sft_npu", code=2)
    assert "/dev/davinci" in out and not (tmp_path / "outputs").exists()


def test_a_nan_ends_the_run_with_5_and_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    out = runner(tmp_path, *JUDGED, "optimizer.lr=1e30", "optimizer.clip_norm=null", code=5)
    assert "this update is not saved" in out


def causal(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


def same_answers(one: Any, other: Any) -> bool:
    ids = torch.arange(20)[None]
    with torch.no_grad():
        return torch.allclose(one(ids).logits, other(ids).logits, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_lora_run_starts_from_the_latest_runs_export_on_the_users_own_file(finished: Path) -> None:
    base = (finished / "outputs/latest").resolve() / "export"
    shutil.copytree(base, finished / "moved")
    rows = [{"prompt": f"reverse {n}", "completion": str(n)[::-1]} for n in range(100, 140)]
    (finished / "my.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    runner(
        finished,
        "algorithm=sft",
        "data=file",
        "data.path=my.jsonl",
        "model=hf",
        "model.path=outputs/latest/export",  # a link that the new run's folder moves
        "adapter=lora",
        "adapter.rank=4",
        "steps=3",
        "tracker=none",
    )
    export = finished / "outputs/latest/export"
    assert (export / "adapter_model.safetensors").exists() and not (export / "model.safetensors").exists()
    merged = runner(finished, "export", "latest", "--merge")
    assert "export-merged\n" in merged and "a Hugging Face folder" in merged
    assert same_answers(PeftModel.from_pretrained(causal(base), export), causal(export.with_name("export-merged")))
    weights = base / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\xbf")  # the last number changes its sign
    words = ("infer", "latest", "reverse 1234", "--max-new-tokens", "4")
    assert "the checkpoint was written for another model: weights of model.path" in runner(finished, *words, code=4)
    assert runner(finished, *words, "model.path=moved")
