"""Adapters folded into weights: the same products, and no trace afterwards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runner.adapter.config import LoraConfig
from runner.adapter.lora import attach
from runner.core.auto_choices import Decisions
from runner.model.causal_lm import CausalLM
from runner.model.export import merge_temporarily
from tests.model.zoo import causal

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def adapted(model: CausalLM | None = None, **options: Any) -> CausalLM:
    """A model whose adapter changes what it says."""
    out = attach(LoraConfig(rank=4, **options), model or causal("qwen2"), decide=Decisions())
    for p in out.trainable().values():
        torch.nn.init.normal_(p, std=0.2, generator=torch.Generator().manual_seed(p.numel()))
    return out


def calls_of_adapters(model: CausalLM) -> list[int]:
    """Grows with every call of an adapter's own matrix."""
    calls: list[int] = []
    for name, part in model.module.named_modules():
        if "lora_A" in name:
            part.register_forward_pre_hook(lambda *_: calls.append(1))
    return calls


@torch.no_grad()
def logits(model: CausalLM) -> torch.Tensor:
    with model._generation_mode():
        return model.causal(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("options", [{}, {"dora": True}, {"targets": ["embed_tokens", "v_proj"]}])
def test_the_products_are_the_same_and_nothing_is_left(options: dict[str, Any]) -> None:
    model = adapted(**options)
    state = {name: t.clone() for name, t in model.module.state_dict().items()}
    wanted, calls = logits(model), calls_of_adapters(model)
    with pytest.raises(KeyError, match="on the way"), merge_temporarily(model.module):
        torch.testing.assert_close(logits(model), wanted, atol=1e-4, rtol=1e-5)
        assert not calls
        raise KeyError("on the way")
    now = model.module.state_dict()
    assert now.keys() == state.keys() and all(torch.equal(now[name], t) for name, t in state.items())
    assert torch.equal(logits(model), wanted)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")  # peft's, about just this
def test_weights_that_another_layer_shares_are_not_folded() -> None:
    model = adapted(causal("qwen2", tie_word_embeddings=True), targets=["embed_tokens"])
    wanted = logits(model)
    with merge_temporarily(model.module):
        assert torch.equal(logits(model), wanted)


def test_coarse_weights_are_not_folded() -> None:
    model = causal("qwen2")
    model.module.bfloat16()
    model = adapted(model)
    wanted, calls = logits(model), calls_of_adapters(model)
    with merge_temporarily(model.module):
        assert torch.equal(logits(model), wanted) and len(calls) > 0


def test_a_model_without_adapters_is_left_alone() -> None:
    model = causal("qwen2")
    weights = [p.data_ptr() for p in model.module.parameters()]
    with merge_temporarily(model.module):
        assert [p.data_ptr() for p in model.module.parameters()] == weights


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_writer_folds_unless_products_are_coarse(dtype: str) -> None:
    model = adapted(causal("qwen2", dtype=dtype))
    writer, row = model.batch_decoder(decide=Decisions()), SimpleNamespace(prompt_ids=(1, 2, 3), is_finished=False)
    calls = calls_of_adapters(model)
    writer.decode([row], lambda logits, rows: setattr(row, "is_finished", True), max_rows=1)
    assert bool(calls) == (dtype == "bfloat16")
