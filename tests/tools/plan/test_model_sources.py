"""`run plan` of each notation of a model: a folder, a run, an export, an adapter; of a plug-in's model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
from safetensors.torch import load_file
from transformers import AutoConfig

from runner.core.errors import SpecError
from runner.model.config import ModelConfig
from runner.tools.plan.model import architecture
from tests.inference.model_folders import write_adapter, write_base

JOB = ("plan", "+recipe=sft_demo", "data.max_length=64", "model=hf", "--json")
DPO = ("plan", "+recipe=dpo_demo", "data.max_length=64", "init_from=null", "model=hf", "--json")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base/, the adapter a/ onto it, and run/, whose export is the base."""
    root = tmp_path_factory.mktemp("models")
    write_adapter(root / "a", write_base(root / "base"))
    (root / "run").mkdir()
    (root / "run" / "spec.yaml").write_text("name: trained\n")
    shutil.copytree(root / "base", root / "run" / "export")
    return root


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's
def test_every_notation_of_a_model_is_planned(folders: Path, command: Any) -> None:
    """An adapter is continued with its own rank and targets, or merged where all weights are trained."""

    def numbers(*words: str) -> tuple[int, int]:
        code, out, err = command(*JOB, *words)
        assert code == 0, err
        policy = json.loads(out)["models"]["policy"]
        return policy["trained"], policy["frozen"]

    base = sum(tensor.numel() for tensor in load_file(folders / "base" / "model.safetensors").values())
    adapter = sum(tensor.numel() for tensor in load_file(folders / "a" / "adapter_model.safetensors").values())
    for name in ("base", "run", "run/export"):
        assert numbers(f"model.path={folders / name}") == (base, 0)
    assert numbers(f"model.path={folders / 'a'}", "adapter=none") == (base, 0)
    assert numbers(f"model.path={folders / 'a'}", "adapter=lora") == (adapter, base)
    assert numbers(f"model.path={folders / 'base'}", "adapter=lora", f"init_from={folders / 'a'}") == (adapter, base)


def test_other_models_of_a_job_are_planned_by_the_same_notations(folders: Path, command: Any) -> None:
    def peak(name: str) -> int:
        words = (f"model.path={folders / 'base'}", f"algorithm.reference_path={folders / name}")
        code, out, err = command(*DPO, *words)
        assert code == 0, err
        return int(json.loads(out)["peak_bytes"])

    assert peak("a") == peak("run") == peak("base")


def test_a_run_without_an_export_is_named(folders: Path, tmp_path: Path, command: Any) -> None:
    (tmp_path / "spec.yaml").write_text("name: new\n")
    code, _, err = command(*JOB, f"model.path={tmp_path}")
    assert code == 2 and "is a run without an export; to write one, type: run export" in err


class WideConfig(ModelConfig):
    """A plug-in's model."""

    factory: ClassVar[str] = "theirs:build"
    tokenizer_factory: ClassVar[str] = f"{__name__}:wide_tokenizer"
    architecture_factory: ClassVar[str | None] = f"{__name__}:wide_architecture"
    name: Literal["wide"] = "wide"


def wide_tokenizer(config: WideConfig) -> str:
    return "abc"


def wide_architecture(config: WideConfig, tokenizer: str, init_from: str | None = None) -> Any:
    return AutoConfig.for_model("qwen2", hidden_size=64, vocab_size=len(tokenizer))


def test_a_plug_in_s_model_has_the_shape_that_its_class_names(monkeypatch: pytest.MonkeyPatch) -> None:
    shape, found = architecture(WideConfig())
    assert (shape.hidden_size, shape.vocab_size, found) == (64, 3, "model=wide")
    monkeypatch.setattr(WideConfig, "architecture_factory", None)
    with pytest.raises(SpecError, match="run plan needs architecture_factory, which model=wide does not have"):
        architecture(WideConfig())
