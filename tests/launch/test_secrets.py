"""Secrets of every known kind, planted where a user can put them: no file of a run, W&B's included, has one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from runner.cli.main import main
from runner.launch.heartbeat import HeartbeatWriter
from runner.launch.rank_main import run_and_report
from runner.run_dir.folder import RunFolder
from runner.sweep import commands
from tests.run_dir.test_manifest import CANARIES

GRPO = (
    "+recipe=grpo_demo", "init_from=null", "steps=1", "model.layers=1", "model.hidden_size=16", "data.items=16",
    "data.held_out=4", "algorithm.batch_size=2", "algorithm.group_size=2", "evaluation.every=0", "tracker=wandb",
    "checkpoint.best=null", "sampler.max_new_tokens=2", "reward=function", "reward.path=mine.py:score",
)  # fmt: skip
# The manifest has the changes of a checkout: no secret stands in this file as a whole.
SHAPED = [CANARIES[name] for name in ("hugging face", "wandb", "openai", "aws id", "github", "slack", "jwt")]
FRAMED = {"Bearer {}": "abcdefgh" + "ijklmnop1234", "https://me:{}@host.example/x": "pass-" + "of-url-77"}
VALUES = {"JUDGE_API_KEY": "plain words " + "of a key", "SERVICE_TOKEN": "other " + "plain words"}


TEXTS = [*SHAPED, *(frame.format(secret) for frame, secret in FRAMED.items()), *VALUES.values()]
SECRETS = [*SHAPED, *FRAMED.values(), *VALUES.values()]
TAGS = f"tracker.tags=[{', '.join(repr(text) for text in TEXTS)}]"
NOTE = "note: tracker.tags looks like a secret and is masked"


def write_reward() -> None:
    """mine.py: a reward that prints every secret, and raises them for some groups of a step."""
    Path("mine.py").write_text(
        f"TEXTS = {TEXTS!r}\ndef score(completions):\n  print(*TEXTS, sep='\\n')\n"
        "  if len(completions) > 1 and len(completions[0]) % 2: raise ValueError(' '.join(TEXTS))\n"
        "  return [0.0] * len(completions)\n"
    )


def leaks(below: str) -> list[tuple[str, str]]:
    """(file, secret) for each secret in a file of this folder."""
    # a copy of the user's code is what the user wrote
    everything = [path for path in Path(below).rglob("*") if "user_files" not in path.parts]
    files = [path for path in everything if path.is_file() and not path.is_symlink()]
    return [(str(path), secret) for path in files for secret in SECRETS if secret.encode() in path.read_bytes()]


@pytest.fixture(autouse=True)
def secret_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in VALUES.items():
        monkeypatch.setenv(name, value)


def test_no_file_of_a_run_has_a_secret(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_reward()
    assert main([*GRPO, TAGS, "tracker.deadline_s=200", f"tracker.display_name='{SHAPED[0]}'"]) == 0
    assert NOTE in capsys.readouterr().err
    assert list(Path("outputs").rglob("*.wandb")) and list(Path("outputs").rglob("reward.log"))
    assert leaks("outputs") == []


def test_no_plan_of_a_sweep_has_a_secret(
    workdir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = [sys.executable, "-c", ""]  # the files of the sweep itself are looked at, and no job's
    monkeypatch.setattr(commands, "make_job_command", lambda folder: lambda job, begun: done)
    main(["-m", "+recipe=sft_demo", "tracker=wandb", TAGS, "seed=1,2", "sweep.metric=eval/loss"])
    assert capsys.readouterr().err.count(NOTE) == 1
    assert list(Path("outputs").rglob("sweep.json")) and list(Path("outputs").rglob("jobs/001.yaml"))
    assert leaks("outputs") == []
    assert main(["-m", "+recipe=sft_demo", "data=file", f"data.path=/{SHAPED[0]}.jsonl", "seed=1,2"]) == 8


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_file_of_a_sweep_of_two_ranks_has_a_secret(workdir: Path) -> None:
    write_reward()
    ranks = (
        "parallelism=ddp",
        "launch.devices=2",
        "device.threads=1",
        "sweep.metric=train/loss",
        "sweep.metric_mode=min",
    )
    assert main(["-m", *GRPO, TAGS, *ranks, "seed=1,2", "sweep.parallel=1"]) == 0
    assert list(Path("outputs").rglob("ranks/1.log"))
    assert leaks("outputs") == []


def test_an_unexpected_error_of_a_rank_is_written_without_secrets(tmp_path: Path) -> None:
    folder, (reading, writing) = RunFolder(tmp_path), os.pipe()

    def fail() -> None:
        raise ValueError(" ".join(TEXTS))

    assert run_and_report(HeartbeatWriter(writing), folder, fail) == 1
    os.close(reading)
    assert "ValueError: " in folder.log.read_text() and leaks(str(tmp_path)) == []


def test_an_error_is_printed_without_secrets(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resume", f"/runs/{SHAPED[0]}"]) == 2
    assert "/runs/*** is not a run" in capsys.readouterr().err


def test_a_secret_that_a_mask_would_break_is_refused_before_anything_is_written(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tracker=none", f"data.path=/data/{SHAPED[0]}/x.jsonl", "data=file", "+recipe=sft_demo"]) == 8
    said = capsys.readouterr().err
    assert "data.path looks like a secret" in said and SHAPED[0] not in said
    assert not Path("outputs").exists()
