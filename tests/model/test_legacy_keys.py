"""The keys of transformers 4 in an exported folder, which transformers 5 reads as before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors
from transformers import AutoConfig, AutoTokenizer
from transformers.models.gemma3 import Gemma3TextConfig
from transformers.models.llama import LlamaTokenizer

from runner.model.export import write_tokenizer
from runner.model.tiny import byte_tokenizer
from tests.model import zoo

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
GEMMA3 = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
}


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.parametrize(
    ("config", "older"),
    [
        (zoo.module("qwen2", rope_parameters=YARN | {"rope_theta": 1e6}, dtype="float32").config,
         {"rope_theta": 1e6, "rope_scaling": YARN, "torch_dtype": "float32"}),
        (zoo.module("qwen3_moe").config, {"rope_theta": 10000.0, "num_experts": 4}),
        (Gemma3TextConfig(**zoo.SHAPE, rope_parameters=GEMMA3, layer_types=["sliding_attention", "full_attention"]),
         {"rope_theta": 2e6, "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 5000.0}),
    ],
    ids=["yarn", "experts", "two-bases"],
)  # fmt: skip
def test_a_config_has_the_keys_of_both_releases(config: Any, older: dict[str, Any], tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    newer, before = read(tmp_path / "config.json"), AutoConfig.from_pretrained(tmp_path).to_dict()
    write_tokenizer(tmp_path, byte_tokenizer(64))
    both = read(tmp_path / "config.json")
    assert both == newer | both and {name: both[name] for name in older} == older
    assert AutoConfig.from_pretrained(tmp_path).to_dict() == before
    if older["rope_theta"] == 10000.0:
        assert "rope_scaling" not in both, "there is none"


def test_a_tokenizer_has_names_that_both_releases_know(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, byte_tokenizer(64))
    settings = read(tmp_path / "tokenizer_config.json")
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert settings["additional_special_tokens"] == ["<|im_start|>"] and "extra_special_tokens" not in settings
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded("<|im_start|>hé")["input_ids"] == byte_tokenizer(64)("<|im_start|>hé")["input_ids"]
    assert loaded.extra_special_tokens == ["<|im_start|>"]


@pytest.mark.parametrize("starts", [True, False])
def test_whether_a_start_token_is_added_is_written(starts: bool, tmp_path: Path) -> None:
    """Llama's class in transformers 4 adds one unless the folder says no; transformers 5 writes neither."""
    tokenizer = LlamaTokenizer(vocab={"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3, "▁": 4}, merges=[])
    template = {"single": "<s> $A", "special_tokens": [("<s>", 1)]} if starts else {"single": "$A"}
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(**template)
    write_tokenizer(tmp_path, tokenizer)
    settings = read(tmp_path / "tokenizer_config.json")
    assert (settings["add_bos_token"], settings["add_eos_token"]) == (starts, False)
    ids = AutoTokenizer.from_pretrained(tmp_path)("a")["input_ids"]
    assert ids == tokenizer("a")["input_ids"] and (ids[0] == 1) is starts
