"""device=npu_sim where its package is not installed: every verb answers with what to install, and does nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.cli import config_sources
from runner.cli.main import main
from runner.core import package
from runner.spec import registry


@pytest.fixture
def without_plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No package with entry points is installed."""
    monkeypatch.setattr(package, "entry_points", lambda group: ())
    registry.default_registry.cache_clear()
    config_sources.plugin_folders.cache_clear()
    yield
    registry.default_registry.cache_clear()
    config_sources.plugin_folders.cache_clear()


@pytest.mark.parametrize(
    "words",
    [
        "device=npu_sim",
        "+recipe=grpo_npu device=npu_sim device.cards=3 launch=ray",
        "-m +recipe=sft_demo device=npu_sim seed=1,2",
        "plan +recipe=sft_npu device=npu_sim",
        "bench device=npu_sim",
        "parity --record a.safetensors +recipe=sft_npu device=npu_sim",
        "doctor device=npu_sim",
        "doctor --prepare npu_sim",
    ],
)
@pytest.mark.usefixtures("without_plugins")
def test_the_answer_is_one_pip_line(words: str, workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    said = capsys.readouterr()
    assert "no device named 'npu_sim'" in said.err and "pip install ./simulators/npu" in said.err
    assert (said.out, list(workdir.iterdir())) == ("", []), "nothing else has happened"


@pytest.mark.usefixtures("without_plugins")
def test_so_it_is_for_a_run_that_was_made_on_it(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (workdir / "spec.yaml").write_text(json.dumps({"device": {"name": "npu_sim"}}))
    assert main(["--spec", "spec.yaml"]) == 2
    assert "pip install ./simulators/npu" in capsys.readouterr().err
