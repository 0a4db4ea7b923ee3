"""Models with a tower for images, trained on text: the tower is frozen and has no adapter, or the job is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers.models.gemma3 import Gemma3Config, Gemma3ForConditionalGeneration
from transformers.models.qwen3_5 import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from runner.adapter import lora
from runner.adapter.config import LoraConfig, NoAdapterConfig
from runner.core.auto_choices import Decisions
from runner.core.errors import SpecError
from runner.model import hf
from runner.model.config import HfConfig
from runner.model.tiny import byte_tokenizer
from tests.model.zoo import CPU, LOGPROBS, SHAPE, batch

TEXT = {**SHAPE, "bos_token_id": 257}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}


def write(folder: Path, model: Any) -> Path:
    model.save_pretrained(folder)
    byte_tokenizer(512).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=TEXT, vision_config=vision, mm_tokens_per_image=4)
    return write(tmp_path_factory.mktemp("gemma3"), Gemma3ForConditionalGeneration(config))


@pytest.fixture(scope="module")
def qwen3_5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    text = {**TEXT, **LINEAR, "layer_types": ["linear_attention", "full_attention"]}
    vision = {"hidden_size": 16, "intermediate_size": 24, "depth": 1, "num_heads": 2, "out_hidden_size": 32}
    config = Qwen3_5Config(text_config=text, vision_config=vision | {"patch_size": 14})
    return write(tmp_path_factory.mktemp("qwen3_5"), Qwen3_5ForConditionalGeneration(config))


def built(folder: Path) -> Any:
    config = HfConfig(path=str(folder))
    return hf.build(config, tokenizer=hf.tokenizer(config), device=CPU, seed=0, decide=Decisions())


def is_of_images(name: str) -> bool:
    return "vision" in name or "multi_modal" in name


def test_a_tower_is_frozen_and_every_weight_of_it_is_exported(gemma3: Path, tmp_path: Path) -> None:
    decide = Decisions(strict=True)
    model = lora.train_all(NoAdapterConfig(), built(gemma3), decide=decide)
    assert "model.vision_tower frozen (only text is trained" in str(decide.entries[-1])
    assert not any(map(is_of_images, model.trainable()))
    data = batch()
    model.linear_loss(data, data.tokens["weight"])[0].backward()
    assert all(p.grad is not None for p in model.trainable().values())
    torch.optim.SGD(model.trainable().values(), lr=0.1).step()
    model.save(tmp_path / "export")
    before, after = (load_file(path / "model.safetensors") for path in (gemma3, tmp_path / "export"))
    assert before.keys() == after.keys()
    assert {name for name in before if torch.equal(before[name], after[name])} == set(filter(is_of_images, before))


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj",)])
def test_an_adapter_is_at_no_tower(targets: Any, gemma3: Path) -> None:
    model = lora.attach(LoraConfig(rank=2, targets=targets), built(gemma3), decide=Decisions(strict=True))
    assert model.trainable() and not any(map(is_of_images, model.trainable()))


def test_images_that_an_export_would_lack_are_refused_where_all_weights_are_written(qwen3_5: Path) -> None:
    model = built(qwen3_5)
    assert model.weights_source.image_tensors > 0
    model.outputs(batch(), LOGPROBS)  # it may be read
    with pytest.raises(SpecError, match=r"model\.path: the folder has \d+ image or audio .*; type adapter=lora"):
        model.weights_source.refuse_lost_tensors("model.path")
    adapted = lora.attach(LoraConfig(rank=2), model, decide=Decisions())
    with pytest.raises(SpecError, match="image or audio tensors"):
        adapted.merge_on_save()
