"""Images in vLLM: it expands them to the ids that the trainer has, and samples what the trainer's model would."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from runner.adapter import lora
from runner.adapter.config import NoAdapterConfig
from runner.core.auto_choices import Decisions
from runner.core.errors import EnvironmentProblem
from runner.core.media import MEDIA_ID
from runner.data.demo_shapes import draw
from runner.interfaces import Request
from runner.model import hf, tiny
from runner.model.config import HfConfig, TinyVlConfig
from runner.sampler.vllm.images import check_prompt_ids, vllm_prompt
from tests.model import vision_zoo
from tests.model.zoo import CPU
from tests.sampler.vllm.engines import MEAN, NEEDED, change, engine, gap

HAS_VISION = importlib.util.find_spec("torchvision") is not None
START, PLACE, END = 302, vision_zoo.IMAGE, 303


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """InternVL, all of it trained; vLLM's attention on the CPU knows heads of 32 and more."""
    for name, value in {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}.items():
        monkeypatch.setitem(vision_zoo.TEXT, name, value)
    config = HfConfig(path=str(vision_zoo.write_folder("internvl", tmp_path / "model")), freeze=())
    tokenizer = hf.tokenizer(config)
    tokenizer.image_reader = hf.image_reader(config, tokenizer)
    made = hf.build(config, tokenizer=tokenizer, device=CPU, seed=0, decide=Decisions())
    return lora.train_all(NoAdapterConfig(), made, decide=Decisions())


def image(seed: int) -> bytes:
    """One that no processor resizes, which pillow and torchvision do differently."""
    content, pixels = io.BytesIO(), np.random.default_rng(seed).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(content, "PNG")
    return content.getvalue()


def prompts(model: Any) -> list[tuple[int, ...]]:
    """With an image, with two, and with none."""
    entries = [model.tokenizer.image_reader.add(image(seed), several=False)[0] for seed in (1, 2)]
    first, second = ((START, *[entry.id] * entry.count, END) for entry in entries)
    return [(65, *first, 66), (*second, 67, *first, 68), (65, 66, 67)]


def test_each_image_is_one_placeholder_for_vllm_and_other_ids_end_the_job(model: Any) -> None:
    one, two, text = prompts(model)
    given = vllm_prompt(two, model.tokenizer, 3)
    assert given["prompt_token_ids"] == [PLACE, 67, PLACE, 68], "vLLM writes what is around an image, too"
    assert [np.asarray(pixels).shape for pixels in given["multi_modal_data"]["image"]] == [(16, 16, 3)] * 2
    assert given["multi_modal_uuids"] == {"image": [f"{i:x}-3" for i in dict.fromkeys(two) if i >= MEDIA_ID]}
    assert vllm_prompt(text, model.tokenizer, 3) == {"prompt_token_ids": [65, 66, 67]}
    theirs = [PLACE if i >= MEDIA_ID else i for i in one]
    check_prompt_ids(one, theirs, model.tokenizer)
    with pytest.raises(
        EnvironmentProblem, match=r"ours is 8 tokens, from 6 on \[303, 66\], but vLLM 9: \[300, 303, 66"
    ):
        check_prompt_ids(one, [*theirs[:-2], PLACE, *theirs[-2:]], model.tokenizer)


@NEEDED[0]
@NEEDED[1]
@pytest.mark.slow
@pytest.mark.skipif(not HAS_VISION, reason="vLLM's image-text models need a torchvision that fits torch")
def test_it_samples_what_the_policy_would_of_an_image(model: Any, tmp_path: Path) -> None:
    asked = [Request(ids, 10 * at + k, 8, at) for at, ids in enumerate(prompts(model)) for k in range(2)]
    (tmp_path / "engine").mkdir()
    with engine(model, tmp_path / "engine") as sampler:
        for version in (1, 2):  # the vision part learns, so that what the first weights made of an image is not kept
            sampler.load_weights(dict(model.hf_tensors("all")), version)
            got = sampler.sample(asked)
            # vLLM reads a placeholder that it has sampled as a token, and the trainer another token in its place
            text = [at for at, one in enumerate(got) if PLACE not in one.ids]
            assert {at // 2 for at in text} == {0, 1, 2}
            assert gap(model, [asked[at] for at in text], [got[at] for at in text]) < MEAN
            change(model, by=0.05)


@NEEDED[0]
@NEEDED[1]
@pytest.mark.slow
@pytest.mark.skipif(not HAS_VISION, reason="vLLM's image-text models need a torchvision that fits torch")
def test_the_pixels_of_qwen_are_normalized_as_for_the_trainer(tmp_path: Path) -> None:
    config = TinyVlConfig(hidden_size=128, intermediate_size=96, heads=4, kv_heads=2, layers=2, dtype="float32")
    tokenizer: Any = tiny.tokenizer(config)
    tokenizer.image_reader = tiny.image_reader(config, tokenizer)
    made = tiny.build(config, tokenizer=tokenizer, device=CPU, seed=0, decide=Decisions())
    policy = lora.train_all(NoAdapterConfig(), made, decide=Decisions())
    entry, _ = tokenizer.image_reader.add(draw(1), several=False)
    start, end = tokenizer.convert_tokens_to_ids(["<|vision_start|>", "<|vision_end|>"])
    asked = [Request((65, start, *[entry.id] * entry.count, end, 66), 5, 8, 0)]
    with engine(policy, tmp_path) as sampler:
        sampler.load_weights(dict(policy.hf_tensors("all")), 1)
        assert gap(policy, asked, sampler.sample(asked)) < MEAN
