"""The tiny model as a user's config makes it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from runner.adapter import lora
from runner.adapter.config import LoraConfig
from runner.core.auto_choices import Decisions
from runner.core.batch import pack
from runner.core.errors import EnvironmentProblem, SpecError
from runner.model import tiny
from runner.model.causal_lm import CausalLM
from runner.model.config import SmallConfig, TinyConfig, TinyMoeConfig
from runner.model.initial_weights import WeightsSource
from tests.model.zoo import CPU, LOGPROBS, batch, greedy


def build(seed: int = 0, kind: type[SmallConfig] = TinyConfig, **options: object) -> CausalLM:
    config = kind(**options)
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
    half.linear_loss(batch(), batch().tokens["weight"])[0].backward()


def test_rows_that_are_too_long_are_refused_at_the_start_and_in_a_batch() -> None:
    config = TinyConfig(max_positions=16)
    with pytest.raises(SpecError, match="sequences of 17 tokens are too long: the model has 16 positions"):
        tiny.build(config, tokenizer=tiny.tokenizer(config), device=CPU, seed=0, decide=Decisions(), longest=17)
    model = build(max_positions=16)
    model.outputs(pack([[1] * 16, [2] * 16], [[1.0] * 16] * 2), LOGPROBS)
    with pytest.raises(SpecError, match="sequences of 17 tokens"):
        model.outputs(pack([[1] * 17], [[1.0] * 17]), LOGPROBS)


def test_the_origin_names_seed_and_shape_or_the_folder_that_it_started_from(tmp_path: Path) -> None:
    one = build(seed=3, hidden_size=64, layers=2)
    assert one.base_fingerprint["drawn"].startswith(
        "from seed 3 for hidden_size=64 intermediate_size=384 layers=2 heads=4"
    )
    assert build(seed=4).base_fingerprint != build(seed=3).base_fingerprint != one.base_fingerprint
    assert build(lm_head_chunk_tokens=7).base_fingerprint == build().base_fingerprint, "how it runs is no matter"
    one.save(tmp_path)
    config = TinyConfig(hidden_size=64, layers=2)
    started = tiny.build(
        config, tokenizer=one.tokenizer, device=CPU, seed=9, decide=Decisions(), init_from=str(tmp_path)
    )
    assert started.base_fingerprint == WeightsSource(folder=tmp_path).identity(weights=False)
    assert started.inner.config._name_or_path == str(tmp_path), "an adapter names its base"


@pytest.mark.parametrize("kind", [TinyConfig, TinyMoeConfig])
def test_a_few_steps_learn_a_row_by_heart(kind: type[SmallConfig]) -> None:
    model = build(kind=kind, hidden_size=64, layers=2, intermediate_size=128)
    ids = model.tokenizer.encode("the quick brown fox<|im_end|>")
    data = pack([ids], [[1.0] * len(ids)])
    optimizer = torch.optim.AdamW(model.trainable().values(), lr=3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        model.linear_loss(data, -data.tokens["weight"] / len(ids))[0].backward()
        optimizer.step()
    assert model.tokenizer.decode(greedy(model, [ids[:4]], 40)[0]) == "quick brown fox"


@pytest.mark.parametrize("options", [{"heads": 2, "kv_heads": 2}, {"kv_heads": 2}])
def test_weights_of_other_heads_are_refused_though_they_would_fit(options: dict[str, int], tmp_path: Path) -> None:
    """4 heads of 8 and 2 heads of 16 have weights of the same shapes, and are not the same function."""
    small = {"hidden_size": 32, "intermediate_size": 48, "layers": 1}
    made = build(**small)
    made.save(tmp_path)
    with pytest.raises(
        EnvironmentProblem, match=r"init_from=.* has num_(attention|key_value)_heads=4, but this model has 2"
    ):
        tiny.build(
            TinyConfig(**{**small, **options}),
            tokenizer=made.tokenizer,
            device=CPU,
            seed=0,
            decide=Decisions(),
            init_from=str(tmp_path),
        )


@pytest.mark.parametrize(("there", "here"), [(2, 1), (1, 2)])
def test_weights_of_another_depth_are_refused_with_both(there: int, here: int, tmp_path: Path) -> None:
    small = {"hidden_size": 32, "intermediate_size": 48}
    made = build(**small, layers=there)
    made.save(tmp_path)
    config, given = TinyConfig(**small, layers=here), {"device": CPU, "seed": 0, "decide": Decisions()}
    with pytest.raises(EnvironmentProblem, match=f"; the folder has {there} layers, this model {here}$"):
        tiny.build(config, tokenizer=made.tokenizer, init_from=str(tmp_path), **given)  # type: ignore[arg-type]


def test_experts_are_drawn_from_the_seed_and_each_token_goes_through_some_of_them() -> None:
    one, same = (build(1, kind=TinyMoeConfig, layers=1, experts=4, experts_per_token=1) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one.trainable().values(), same.trainable().values(), strict=True))
    assert one.base_fingerprint["drawn"].endswith("experts=4 experts_per_token=1")
    one.outputs(pack([[5, 6]], [[1.0] * 2]), LOGPROBS)["logprobs"].sum().backward()
    reached = one.causal.model.layers[0].mlp.experts.down_proj.grad.flatten(1).any(1)
    assert 1 <= int(reached.sum()) <= 2, "two tokens, one expert each"


def test_a_model_of_experts_starts_from_what_another_one_left(tmp_path: Path) -> None:
    """The folder has each expert by itself, its gate and up apart, as published models have."""
    small = {"hidden_size": 32, "layers": 2, "experts": 4}
    made = build(kind=TinyMoeConfig, **small)
    made.save(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as tensors:
        assert "model.layers.1.mlp.experts.3.up_proj.weight" in tensors.keys()  # noqa: SIM118
    given = {"tokenizer": made.tokenizer, "device": CPU, "seed": 9, "decide": Decisions(), "init_from": str(tmp_path)}
    started = tiny.build(TinyMoeConfig(**small), **given)  # type: ignore[arg-type]
    for name, parameter in made.trainable().items():
        assert torch.equal(started.trainable()[name], parameter), name
    for more, said in (
        ({"experts": 8}, r"mlp\.gate\.weight has shape .* in this model"),
        ({"experts_per_token": 1}, "has num_experts_per_tok=2, but this model has 1"),
    ):
        with pytest.raises(EnvironmentProblem, match=said):
            tiny.build(TinyMoeConfig(**{**small, **more}), **given)  # type: ignore[arg-type]


def test_an_expert_that_a_folder_lacks_is_missed(tmp_path: Path) -> None:
    made = build(kind=TinyMoeConfig, hidden_size=32, layers=1, experts=4)
    made.save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.0.mlp.experts.2.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    config = TinyMoeConfig(hidden_size=32, layers=1, experts=4)
    with pytest.raises(EnvironmentProblem, match=r"lacks 1 of the model's weights, e\.g\. .*experts\.gate_up_proj"):
        tiny.build(config, tokenizer=made.tokenizer, device=CPU, seed=9, decide=Decisions(), init_from=str(tmp_path))


def test_adapters_on_experts_are_merged_into_them(tmp_path: Path) -> None:
    model = build(kind=TinyMoeConfig, hidden_size=32, layers=1, experts=4)
    adapted = lora.attach(LoraConfig(rank=2), model, decide=Decisions())
    for name, parameter in adapted.trainable().items():
        if "lora_B" in name:
            parameter.data.normal_(generator=torch.Generator().manual_seed(len(name)), std=0.1)
    wanted = adapted.outputs(batch(), LOGPROBS)["logprobs"]
    assert any("experts" in name for name in adapted.trainable())
    adapted.save(tmp_path)
    config = TinyMoeConfig(hidden_size=32, layers=1, experts=4)
    merged = tiny.build(
        config, tokenizer=model.tokenizer, device=CPU, seed=9, decide=Decisions(), init_from=str(tmp_path)
    )
    torch.testing.assert_close(merged.outputs(batch(), LOGPROBS)["logprobs"], wanted, atol=1e-4, rtol=1e-4)
