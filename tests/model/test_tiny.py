"""The tiny model as a user's config makes it."""

from __future__ import annotations

import torch

from runner.decisions import Decisions
from runner.model import tiny
from runner.model.causal import CausalLM
from runner.model.config import TinyConfig
from tests.model.zoo import CPU, LOGPROBS, batch


def build(seed: int = 0, **options: object) -> CausalLM:
    config = TinyConfig(**options)  # type: ignore[arg-type]
    return tiny.build(config, tokenizer=tiny.tokenizer(config), device=CPU, seed=seed, decide=Decisions(strict=True))


def test_the_default_has_about_a_million_parameters_and_makes_no_decision() -> None:
    model = build()
    assert 0.9e6 < sum(p.numel() for p in model.trainable().values()) < 1.1e6
    assert (model.causal.config.num_hidden_layers, model.causal.config.num_attention_heads) == (4, 4)
    assert model.tokenizer.model_max_length == 2048


def test_weights_are_a_function_of_the_seed_alone() -> None:
    state = torch.get_rng_state()
    one, same, other = ([p for p in build(seed).trainable().values()] for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert not torch.equal(one[0], other[0])


def test_bfloat16_rounds_the_same_weights_but_not_the_rotary_frequencies() -> None:
    full, half = build(), build(dtype="bfloat16")
    assert all(
        p.dtype == torch.bfloat16 and torch.equal(p, q.bfloat16())
        for p, q in zip(half.trainable().values(), full.trainable().values(), strict=True)
    )
    assert half.causal.model.rotary_emb.inv_freq.dtype == torch.float32
    got, wanted = (m.outputs(batch(), LOGPROBS)["logprobs"] for m in (half, full))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, wanted, atol=0.05, rtol=0.01)
    half.linear(batch(), batch().tokens["weight"])[0].backward()


def test_a_few_steps_learn_a_row_by_heart() -> None:
    model = build(hidden_size=64, layers=2, intermediate_size=128)
    ids = model.tokenizer.encode("the quick brown fox<|im_end|>")
    from runner.batch import pack

    data = pack([ids], [[1.0] * len(ids)])
    optimizer = torch.optim.AdamW(model.trainable().values(), lr=3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        model.linear(data, -data.tokens["weight"] / len(ids))[0].backward()
        optimizer.step()
    assert model.tokenizer.decode(model.generate([ids[:4]], 40)[0]) == "quick brown fox"
