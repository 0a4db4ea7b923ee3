"""Tab completion, as a shell asks for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.cli.main import main
from runner.cli.verbs import VERBS
from runner.spec.registry import default_registry


def completed(
    line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, shell: str = "bash"
) -> list[str]:
    monkeypatch.setenv("COMP_LINE", line)
    assert main(["-sc", f"query={shell}"]) == 0
    return capsys.readouterr().out.split()


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("run device=", [f"device={name}" for name in sorted(default_registry().classes("device"))]),
        ("run device=c", ["device=cpu", "device=cuda"]),
        ("run +rec", ["+recipe="]),
        ("run recipe=sft_n", ["recipe=sft_npu"]),
        ("run +recipe=sft_d", ["+recipe=sft_demo"]),
        ("run +recipe=my/", ["+recipe=my/own"]),
        ("run +recipe=recipes/m", ["+recipe=recipes/my/"]),
        ("run +recipe=recipes/my/o", ["+recipe=recipes/my/own.yaml"]),
        ("run +model@r", ["+model@reward.path="]),
        ("run model@algorithm.teacher=h", ["model@algorithm.teacher=hf"]),
        ("run optimizer.l", ["optimizer.lr="]),
        ("run optimizer=sgd optimizer.mo", ["optimizer.momentum="]),
        ("run data=file data.pa", ["data.path="]),
        ("run explain optimizer.l", ["optimizer.lr="]),
        ("run list devi", ["device"]),
        ("run res", ["resume"]),
        ("run resume la", ["latest"]),
        ("run chat la", ["latest"]),
        ("run eval la", ["latest"]),
        ("run resume latest step", ["steps="]),
        ("run model.dtype=", ["model.dtype=bfloat16", "model.dtype=float32", "model.dtype=null"]),
        ("run checkpoint.best_mode=m", ["checkpoint.best_mode=max", "checkpoint.best_mode=min"]),
        ("run strict=", ["strict=false", "strict=true"]),
        ("run infer latest --te", ["--temperature"]),
        ("run --sp", ["--spec"]),
        ("run parity --com", ["--compare"]),
        ("run bench --min", ["--min-mfu"]),
        ("run parity --record cpu optimizer.l", ["optimizer.lr="]),
        ("run --mul", ["--multirun"]),
        ("run sweep re", ["report", "resume"]),
        ("run sweep resume la", ["latest"]),
        ("run sweep resume --re", ["--retry-failed"]),
        ("run -m sweep.time", ["sweep.timeout_s="]),
        ("run -m sweep.fail_fast=", ["sweep.fail_fast=false", "sweep.fail_fast=true"]),
        ("run report la", ["latest"]),
        ("run hydra", []),
        ("run nonsense=( ste", []),
    ],
)
def test_query(
    line: str, found: list[str], workdir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (workdir / "recipes" / "my").mkdir(parents=True)
    (workdir / "recipes" / "my" / "own.yaml").write_text("steps: 3\n")
    assert completed(line, capsys, monkeypatch) == found


def test_an_empty_line_offers_verbs_groups_and_keys(
    workdir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = completed("run ", capsys, monkeypatch, "fish")
    assert {*VERBS, "device=", "optimizer.", "recipe=", "steps="} <= set(found)
    assert not [word for word in found if word.startswith("hydra")]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_install_prints_a_script(
    shell: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["run"])
    assert main(["-sc", f"install={shell}"]) == 0
    assert "query=" in capsys.readouterr().out
