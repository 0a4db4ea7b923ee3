"""Exports in few bits, by the llmcompressor of another environment; what is refused before it starts."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from runner.cli.job_builder import compose_job
from runner.cli.main import main
from runner.core.errors import EnvironmentProblem
from runner.inference.model_source import load_source, parse_source
from runner.launch.infer_export import export
from runner.launch.quantized_export import LARGEST_DIFF, refuse_quantizing
from runner.run_dir.folder import RunFolder
from tests.inference.model_folders import write_adapter, write_base
from tests.model.zoo import causal

GUEST_PYTHON = os.environ.get("LLMCOMPRESSOR_PYTHON", "")  # of an environment that has it
HERE = Path(sys.executable)


def test_it_needs_a_run_and_an_environment(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    base = write_base(tmp_path / "base")
    assert main(["export", str(base), "--quantize", "w8a8", "--with", sys.executable]) == 2
    assert "--quantize is for a run, and needs --with ENV, where llmcompressor is installed" in capfd.readouterr().err


def test_what_cannot_be_read_or_would_be_replaced_is_refused_before_anything_is_loaded(workdir: Path) -> None:
    job, folder = ["+recipe=sft_demo"], RunFolder(workdir)
    with pytest.raises(EnvironmentProblem, match="vllm-ascend has it for expert layers only\n  type --quantize w8a8"):
        export(folder, compose_job([*job, "device=npu"]).spec, "last", None, other=HERE, quantize="w4a16")
    (workdir / "small-w8a8").mkdir()
    (workdir / "small-w8a8" / "mine").touch()
    with pytest.raises(EnvironmentProblem, match="small-w8a8 exists and is not an empty folder"):
        export(folder, compose_job(job).spec, "last", workdir / "small", other=HERE, quantize="w8a8")


def test_adapters_experts_and_an_environment_without_it_are_refused(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", write_base(tmp_path / "base"))
    adapted = load_source(parse_source(str(adapter)), device="cpu").model
    with pytest.raises(EnvironmentProblem, match="the export is an adapter\n  type --merge too"):
        refuse_quantizing(adapted, HERE)
    adapted.merge_on_save()
    with pytest.raises(EnvironmentProblem, match=r"has no llmcompressor\n.*pip install 'llmcompressor"):
        refuse_quantizing(adapted, HERE)
    with pytest.raises(EnvironmentProblem, match="dense language models of text"):
        refuse_quantizing(causal("qwen3_moe"), HERE)


SMALL = ["hidden_size=64", "intermediate_size=128", "layers=2"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not GUEST_PYTHON, reason="LLMCOMPRESSOR_PYTHON names no environment with llmcompressor")
def test_its_scores_are_close_to_the_runs_within_the_bound(
    workdir: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    sizes = [f"model.{size}" for size in SMALL]
    assert main(["+recipe=sft_demo", *sizes, "steps=2", "evaluation.every=2", "data.held_out=4", "data.items=32"]) == 0
    run = Path("outputs/latest").resolve()
    for scheme in LARGEST_DIFF:
        assert main(["export", "latest", "--quantize", scheme, "--with", GUEST_PYTHON]) == 0
        said, target = capfd.readouterr().err, run / f"export-{scheme}"
        [check] = [line.removeprefix("check    ") for line in said.splitlines() if line.startswith("check")]
        assert f"per token, at most {LARGEST_DIFF[scheme]}" in check and "gguf" not in said
        assert len({path.stat().st_mode for path in target.iterdir()}) == 1, "safetensors writes mode 600"
        config = json.loads((target / "config.json").read_text())
        assert config["quantization_config"]["quant_method"] == "compressed-tensors"
        card = (target / "README.md").read_text()
        assert card.count("## Check") == 1 and card.endswith(
            f"to {scheme} by llmcompressor and compared with the run: {check}.\n"
        )
    monkeypatch.setitem(LARGEST_DIFF, "w8a8", -1.0)
    assert main(["export", "latest", "--out", "other", "--quantize", "w8a8", "--with", GUEST_PYTHON]) == 5
    assert "more than -1" in capfd.readouterr().err and not Path("other-w8a8").exists()
    assert main(["+recipe=sft_demo", "model.hidden_size=48", *sizes[1:], "steps=1", "evaluation.every=0"]) == 0
    assert main(["export", "latest", "--quantize", "w4a16", "--with", GUEST_PYTHON]) == 2
    assert "none of (128, 64, 32) divides the inputs [48, 128] of all layers; use w8a8" in capfd.readouterr().err
