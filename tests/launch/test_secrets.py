"""Secrets of every known kind, planted where a user can put them: no file of a run, W&B's included, has one."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.cli.main import main
from tests.run_dir.test_manifest import CANARIES

GRPO = (
    "+recipe=grpo_demo", "init_from=null", "steps=1", "model.layers=1", "model.hidden_size=16", "data.items=16",
    "data.held_out=4", "algorithm.batch_size=2", "algorithm.group_size=2", "evaluation.every=0", "tracker=wandb",
    "checkpoint.best=null", "sampler.max_new_tokens=2", "reward=function", "reward.path=mine.py:score",
)  # fmt: skip
SHAPED = [CANARIES[name] for name in ("hugging face", "wandb", "openai", "aws id", "github", "slack", "jwt")]
FRAMED = {"Bearer {}": "abcdefghijklmnop1234", "https://me:{}@host.example/x": "pass-of-url-77"}
VALUES = {"JUDGE_API_KEY": "plain words of a key", "SERVICE_TOKEN": "other plain words"}


def test_no_file_of_a_run_has_a_secret(
    workdir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in VALUES.items():
        monkeypatch.setenv(name, value)
    texts = [*SHAPED, *(frame.format(secret) for frame, secret in FRAMED.items()), *VALUES.values()]
    Path("mine.py").write_text(
        f"TEXTS = {texts!r}\ndef score(completions):\n  print(*TEXTS, sep='\\n')\n"
        "  if len(completions[0]) % 2: raise ValueError(' '.join(TEXTS))\n  return [0.0] * len(completions)\n"
    )
    tags = ", ".join(f"'{text}'" for text in texts)
    assert main([*GRPO, f"tracker.tags=[{tags}]", f"tracker.display_name='{SHAPED[0]}'"]) == 0
    assert "note: tracker.tags holds what looks like a secret: masked" in capsys.readouterr().err
    files = [path for path in Path("outputs").rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files) and any(path.name == "reward.log" for path in files)
    secrets = [*SHAPED, *FRAMED.values(), *VALUES.values()]
    hits = [(path.name, secret) for path in files for secret in secrets if secret.encode() in path.read_bytes()]
    assert hits == []


def test_a_secret_that_a_mask_would_break_is_refused_before_anything_is_written(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tracker=none", f"data.path=/data/{SHAPED[0]}/x.jsonl", "data=file", "+recipe=sft_demo"]) == 8
    said = capsys.readouterr().err
    assert "data.path holds what looks like a secret" in said and SHAPED[0] not in said
    assert not Path("outputs").exists()
