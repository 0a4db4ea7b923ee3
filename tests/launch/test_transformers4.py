"""Exports under transformers 4.57 and peft 0.15, as users of vLLM below 0.23 have them (`make test-transformers4`)."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.adapter import lora
from runner.adapter.config import LoraConfig
from runner.cli.main import main
from runner.core.auto_choices import Decisions
from runner.launch.export_check import PROBE
from runner.model import hf
from runner.model.config import HfConfig
from runner.model.tiny import byte_tokenizer
from tests.inference.model_folders import write_base
from tests.model import zoo
from tests.small import TINY

PYTHON = os.environ.get("RUN_TRANSFORMERS4_PYTHON", "")
ROPE = {"rope_type": "default", "rope_theta": 1e6}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
FULL: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("llama", {"rope_parameters": LLAMA3}),
    "qwen2": ("qwen2", {"rope_parameters": ROPE, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"rope_parameters": ROPE}),
    "qwen3_moe": ("qwen3_moe", {"rope_parameters": ROPE}),
    "gpt_oss": ("gpt_oss", {}),
}
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "dora": ("qwen3", {"dora": True, "modules_to_save": ("lm_head",)}),
    "rslora": ("llama", {"rslora": True, "targets": ("q_proj", "embed_tokens")}),
    "experts": ("qwen3_moe", {}),
}
ROW = byte_tokenizer(64)("<|im_start|>hé")["input_ids"]
ANSWER = byte_tokenizer(64)(" is a short text, and it goes on for a while")["input_ids"]
# Loads every folder in one process, since each start takes seconds.
LOOP = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import export_probe, torch
from transformers import AutoTokenizer
asked = {"text": "h\u00e9", "style": "text", "begin": [257], "max_new_tokens": 1, "image": None}
asked["answer"] = json.load(sys.stdin)
found = {}
for path in sys.argv[2:]:
    try:
        loaded, tokenizer = export_probe.load(Path(path), None, "float32"), AutoTokenizer.from_pretrained(path)
        found[path] = export_probe.answer(loaded, tokenizer, Path(path), asked)
    except Exception as error:
        found[path] = {"error": str(error)}
print(json.dumps(found))
"""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="RUN_TRANSFORMERS4_PYTHON names no environment with transformers 4.57"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # peft's
]
Logprobs = list[float]


def logprobs(model: Any) -> Logprobs:
    """log p of each id of ANSWER after ROW, by the model itself."""
    batch = zoo.pack([[*ROW, *ANSWER]], [[1.0] * (len(ROW) + len(ANSWER))])
    with torch.no_grad():
        found: Logprobs = model.outputs(batch, zoo.LOGPROBS)["logprobs"][len(ROW) :].tolist()
    return found


def adapted(base: Path, options: Mapping[str, Any]) -> Any:
    config, decide = HfConfig(path=str(base)), Decisions()
    model: Any = hf.build(config, tokenizer=hf.tokenizer(config), device=zoo.CPU, seed=0, decide=decide)
    model = lora.attach(LoraConfig(rank=2, **options), model, decide=decide)
    torch.manual_seed(3)
    for parameter in model.trainable().values():
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.eval()
    return model


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Logprobs, Any]]:
    """Of each export what its model computes, and what transformers 4 computes."""
    root = tmp_path_factory.mktemp("exports")
    own: dict[str, Logprobs] = {}
    for name, (kind, options) in FULL.items():
        model: Any = zoo.causal(kind, **options)
        model.save(root / name)
        own[name] = logprobs(model)
    bare = json.loads((root / "llama3" / "config.json").read_text())
    zoo.causal("llama", rope_parameters=LLAMA3).save(root / "bare")  # as transformers 5 alone writes it
    kept = {name: value for name, value in bare.items() if name not in ("rope_theta", "rope_scaling")}
    (root / "bare" / "config.json").write_text(json.dumps(kept))
    own["bare"] = own["llama3"]
    for name, (kind, options) in ADAPTERS.items():
        model = adapted(write_base(root / f"base-{name}", kind), options)
        model.save(root / name)
        own[name] = logprobs(model)
    command = [PYTHON, "-c", LOOP, str(PROBE.parent), *(str(root / name) for name in own)]
    done = subprocess.run(command, input=json.dumps(ANSWER), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    theirs = json.loads(done.stdout.splitlines()[-1])
    return {name: (values, theirs[str(root / name)]) for name, values in own.items()}


@pytest.mark.parametrize("name", [*FULL, *ADAPTERS])
def test_an_export_computes_the_same(name: str, results: dict[str, tuple[Logprobs, Any]]) -> None:
    own, theirs = results[name]
    assert "error" not in theirs, theirs
    assert theirs["prompt_ids"] == ROW
    assert max(abs(a - b) for a, b in zip(own, theirs["logprobs"], strict=True)) < 1e-4


def test_without_the_older_keys_it_computes_something_else(results: dict[str, tuple[Logprobs, Any]]) -> None:
    own, theirs = results["bare"]
    assert max(abs(a - b) for a, b in zip(own, theirs["logprobs"], strict=True)) > 0.1


def test_run_export_checks_with_another_environment(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*TINY, "steps=1", "--folder", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    words = ["export", str(tmp_path / "run"), "--with", str(Path(PYTHON).parents[1]), "--out", str(tmp_path / "out")]
    assert main(words) == 0
    said = capsys.readouterr().err
    assert "transformers 4.57" in said and "transformers 5" in said, said
    assert "transformers 4.57" in (tmp_path / "out" / "README.md").read_text()
