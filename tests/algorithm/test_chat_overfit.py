"""A tiny model that learnt one conversation by heart writes each of its turns again, whatever the chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from runner.algorithm.sft import CrossEntropy
from runner.core.auto_choices import Decisions
from runner.core.batch import pack, with_totals
from runner.data.chat import Renderer
from runner.data.config import FileConfig
from runner.data.prepare import build as build_data
from runner.interfaces import Request
from runner.model import hf
from runner.model.config import HfConfig
from runner.sampler.config import TorchSamplerConfig
from runner.sampler.torch import TorchSampler
from tests.data.chat_families import FAMILIES, KINDS, Family, encode_chat, family_tokenizer

CPU = torch.device("cpu")
LATER = [{"role": "user", "content": "tomorrow?"}, {"role": "assistant", "content": "Rain."}]


def conversation(family: Family) -> tuple[list[Any], tuple[Any, ...]]:
    """Three turns of the assistant with a tool call; with an answer in words where the template writes no calls."""
    messages, tools = [*KINDS["tools"][0], *LATER], KINDS["tools"][1]
    tokenizer = family_tokenizer(family.template(), family.bos, family.eos)
    if isinstance(encode_chat(tokenizer, messages, tools, family.options), str):
        messages, tools = [*KINDS["three turns"][0]], ()
    return messages, tools


def model_for(tokenizer: Any, ends: list[int], folder: Path) -> Any:
    """A Qwen3 model of random weights with a tokenizer, from a folder as a checkpoint is."""
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen3Config(
        vocab_size=len(tokenizer), num_key_value_heads=2, head_dim=16, tie_word_embeddings=False, **shape
    )
    module = Qwen3ForCausalLM(config)
    module.generation_config.eos_token_id = ends
    module.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    loaded = HfConfig(path=str(folder))
    return hf.build(loaded, tokenizer=tokenizer, device=CPU, seed=0, decide=Decisions())


@pytest.mark.slow
@pytest.mark.parametrize("family", [f for f in FAMILIES if f.name != "DeepSeek-V3/R1"], ids=lambda family: family.name)
def test_every_turn_is_written_again_to_its_end_token(family: Family, tmp_path: Path) -> None:
    messages, tools = conversation(family)
    tokenizer = family_tokenizer(family.template(), family.bos, family.eos)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": messages, "tools": tools}))
    config = FileConfig(path=str(tmp_path / "rows.jsonl"), max_length=8192)
    options: dict[str, Any] = {"seed": 0, "decide": Decisions(), "cache_dir": tmp_path / "cache", "kind": "sft"}
    [item] = build_data(config, tokenizer=tokenizer, chat=family.options, **options).take(0, 1)
    rows = encode_chat(tokenizer, messages, tools, family.options)
    assert not isinstance(rows, str)
    spans = [span for row in rows for span in trained_spans(row.ids, row.loss_mask)]
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    assert len(spans) == len(turns) == 3
    ends = {span[-1] for span in spans}  # Phi-3 writes two of them after a last turn, and generation stops at the first
    spans = [span[: 1 + next(i for i, token in enumerate(span) if token in ends)] for span in spans]
    model = model_for(tokenizer, sorted(ends), tmp_path / "model")
    batch = pack([item.ids], [item.weights], [item.branches])
    batch, loss = with_totals(batch, batch.count()), CrossEntropy()
    optimizer = torch.optim.AdamW(model.trainable().values(), lr=3e-3)
    for _ in range(150):
        value, _ = model.linear_loss(batch, loss.grad_weights(batch))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        if value < 0.005:
            break
    model.eval()
    longest = max(map(len, spans)) + 8
    sampler = TorchSampler(TorchSamplerConfig(max_new_tokens=longest, top_k=1), model=model, decide=lambda *_: None)
    renderer = Renderer(tokenizer, family.options)
    prompts = [renderer.control.ids_of(renderer.render_prompt(messages[:turn], tools)) for turn in turns]
    asked = [Request(tuple(ids), 0, longest, at) for at, ids in enumerate(prompts)]
    assert [list(rollout.ids) for rollout in sampler.sample(asked)] == spans


def trained_spans(ids: list[int], mask: list[int]) -> list[list[int]]:
    """The stretches of ids that are trained on."""
    found: list[list[int]] = []
    for at, (token, trained) in enumerate(zip(ids, mask, strict=True)):
        if trained and not mask[at - 1]:
            found.append([])
        if trained:
            found[-1].append(token)
    return found
