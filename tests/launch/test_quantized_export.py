"""Exports in few bits, by the llmcompressor of another environment; what is refused before it starts."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from runner.cli.main import main
from runner.core.errors import EnvironmentProblem, ParityError
from runner.inference.model_source import load_source, parse_source
from runner.launch.quantized_export import LARGEST_DIFF, write_quantized_export
from tests.inference.model_folders import write_base

GUEST_PYTHON = os.environ.get("LLMCOMPRESSOR_PYTHON", "")  # of an environment that has it


def test_it_needs_a_run_and_an_environment(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    base = write_base(tmp_path / "base")
    assert main(["export", str(base), "--quantize", "w8a8", "--with", sys.executable]) == 2
    assert "--quantize is for a run, and needs --with ENV, where llmcompressor is installed" in capfd.readouterr().err


def test_models_with_experts_and_an_environment_without_it_are_refused(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    loaded = load_source(parse_source(str(base)), device="cpu")
    with pytest.raises(EnvironmentProblem, match=r"No module named .*\n.*pip install 'llmcompressor"):
        write_quantized_export(loaded.model, base, "w8a8", Path(sys.executable), ["hi"], "text")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "num_experts": 4}))
    with pytest.raises(EnvironmentProblem, match="dense language models of text"):
        write_quantized_export(loaded.model, base, "w8a8", Path(sys.executable), ["hi"], "text")
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


@pytest.mark.slow
@pytest.mark.skipif(not GUEST_PYTHON, reason="LLMCOMPRESSOR_PYTHON names no environment with llmcompressor")
@pytest.mark.parametrize("scheme", ["w8a8", "w4a16"])
def test_its_answers_are_close_to_the_models_within_the_bound(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = write_base(tmp_path / "base")
    (base / "README.md").write_text("# card\n")
    loaded = load_source(parse_source(str(base)), device="cpu")
    target, said = write_quantized_export(loaded.model, base, scheme, Path(GUEST_PYTHON), ["hi", "soup"], "text")
    assert target.name == f"base-{scheme}" and "per token, at most" in said
    assert (
        json.loads((target / "config.json").read_text())["quantization_config"]["quant_method"] == "compressed-tensors"
    )
    assert said in (target / "README.md").read_text()
    monkeypatch.setitem(LARGEST_DIFF, scheme, -1.0)
    with pytest.raises(ParityError, match="more than -1"):
        write_quantized_export(loaded.model, base, scheme, Path(GUEST_PYTHON), ["hi"], "text")
