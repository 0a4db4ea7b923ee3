"""Dropout switched off: training mode computes what evaluation mode does, whatever the architecture calls its rates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.opt import OPTConfig, OPTForCausalLM

from runner.adapter import lora
from runner.adapter.config import LoraConfig
from runner.core.auto_choices import Decisions
from runner.model.causal_lm import CausalLM
from tests.model.zoo import LOGPROBS, ZOO, batch, causal

OPT = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 6, "num_attention_heads": 4, "word_embed_proj_dim": 32}


@pytest.fixture
def with_opt(monkeypatch: pytest.MonkeyPatch) -> None:
    """OPT keeps its rates as numbers, and drops whole layers."""
    monkeypatch.setitem(ZOO, "opt", lambda **o: OPTForCausalLM(OPTConfig(vocab_size=300, **OPT | o)))


def passes(model: CausalLM) -> list[torch.Tensor]:
    """Two passes with gradient, each with dropout streams of its own, and one without."""
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        found.append(model.outputs(batch(), LOGPROBS)["logprobs"].detach())
    with torch.no_grad():
        return [*found, model.outputs(batch(), LOGPROBS)["logprobs"]]


@pytest.mark.usefixtures("with_opt")
@pytest.mark.parametrize(
    ("kind", "rates"),
    [
        ("gpt2", {"attn_pdrop": 0.2, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
        ("gpt2", {"attn_pdrop": 0.0, "resid_pdrop": 0.1, "embd_pdrop": 0.1}),
        ("qwen2", {"attention_dropout": 0.2}),
        ("bloom", {"hidden_dropout": 0.2}),
        ("opt", {"dropout": 0.2, "attention_dropout": 0.0}),
        ("opt", {"dropout": 0.0, "attention_dropout": 0.2}),
        ("opt", {"dropout": 0.0, "attention_dropout": 0.0, "layerdrop": 0.5}),
        ("lora", {"dropout": 0.2}),
        ("lora", {"dropout": 0.2, "dora": True}),
    ],
    ids=lambda v: v if isinstance(v, str) else " ".join(v),
)
def test_nothing_is_dropped_any_more(kind: str, rates: dict[str, Any]) -> None:
    model = attached(**rates) if kind == "lora" else causal(kind, **rates)
    one, two, still = passes(model)
    assert not torch.equal(one, two), "or the test shows nothing"
    assert model.disable_dropout() == max(rate for rate in rates.values() if rate is not True)
    one, two, again = passes(model)
    torch.testing.assert_close(one, again)
    assert torch.equal(one, two) and torch.equal(still, again)
    assert model.disable_dropout() == 0


def attached(**options: Any) -> CausalLM:
    """An adapter whose update is not zero."""
    made = lora.attach(LoraConfig(rank=4, **options), causal("qwen2"), decide=Decisions(strict=True))
    with torch.no_grad():
        for name, parameter in made.trainable().items():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)) * 0.1)
    return made
