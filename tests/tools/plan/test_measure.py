"""Weights and passes without data: known numbers, sums done by hand, and the straight line through depths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from runner.algorithm.preference.learning import pack_pairs
from runner.core.micro_batches import micro_batches
from runner.interfaces import PreferencePair
from runner.parallelism.mesh import Mesh
from runner.tools.plan import measure
from runner.tools.plan.measure import Passes, longest_row_tokens, micro_batch
from runner.tools.plan.meta_memory_tracker import META, MetaMemoryTracker, keep_gradients
from runner.tools.plan.model import architecture, build_meta_model, expert_parallel_config, published_config
from runner.tools.plan.plan_text import image_lines
from runner.tools.plan.rank_layout import RankLayout, model_weights
from runner.tools.plan.rollout_memory import token_bytes

SMALL = ("model.hidden_size=64", "model.intermediate_size=128", "model.vocab_size=512", "data.max_length=128")
SHAPE = AutoConfig.for_model("qwen2", max_position_embeddings=8192)


def on(mesh: Mesh, **more: Any) -> RankLayout:
    """Whole copies on this mesh."""
    given = {"pieces": 1, "experts": mesh.ep, "chunks": 1, "ring": False, "offloaded": False, "resharded": False}
    given["memory"] = 0
    return RankLayout(mesh=mesh, **given | more)


def passes(spec: Any) -> Passes:
    return Passes(spec, "lm", architecture(spec.model)[0], on(Mesh()))


@pytest.mark.parametrize(
    ("path", "numbers"),
    [
        ("Qwen/Qwen2.5-7B", 7_615_616_512),
        ("Qwen/Qwen2.5-14B-Instruct", 14_770_033_664),
        ("Qwen/Qwen3-30B-A3B", 30_532_122_624),
        ("Qwen/Qwen2.5-0.5B", 494_032_768),
        ("Qwen/Qwen3-0.6B", 596_049_920),
        ("meta-llama/Llama-3.1-8B", 8_030_261_248),
        ("meta-llama/Llama-3.2-1B", 1_235_814_400),
        ("Qwen/Qwen2.5-VL-3B-Instruct", 3_754_622_976),
        ("Qwen/Qwen2.5-VL-7B-Instruct", 8_292_166_656),
        ("Qwen/Qwen3-VL-30B-A3B-Instruct", 31_070_754_032),
        ("OpenGVLab/InternVL3-8B-hf", 7_944_373_760),
    ],
)
def test_published_shapes_have_their_published_number_of_weights(compose: Any, path: str, numbers: int) -> None:
    spec = compose("+recipe=sft_full_npu", f"model.path={path}")
    assert model_weights(spec, "lm", published_config(path)[0]).total == numbers


def test_a_vision_part_is_frozen_and_no_token_pays_for_it(compose: Any) -> None:
    spec = compose("+recipe=sft_full_npu", "model.path=Qwen/Qwen2.5-VL-3B-Instruct")
    shape = published_config("Qwen/Qwen2.5-VL-3B-Instruct")[0]
    got = model_weights(spec, "lm", shape)
    vision = 3_754_622_976 - 3_085_938_688  # without Qwen2.5-3B
    assert (got.all.frozen, got.flops.weights.frozen) == (vision, 0)
    assert vision * 0.99 < got.flops.vision.frozen < vision and got.flops.vision.trained == 0
    assert got.flops.update(10, 0, lambda _: 0, patches=3) - got.flops.update(10, 0, lambda _: 0) == (
        3 * 2 * got.flops.vision.frozen
    )
    text = " ".join(image_lines(shape))
    assert "1 for 28 x 28 pixels, so that 1024 x 1024 are 1369; each counts as 5 tokens of micro_batch_tokens" in text
    assert not list(image_lines(published_config("Qwen/Qwen2.5-7B")[0]))


def test_weights_are_counted_by_what_learns_and_by_layer(compose: Any) -> None:
    spec = compose("+recipe=sft_demo", *SMALL, "adapter=lora", "model.layers=2", "model.dtype=bfloat16")
    shape, found = architecture(spec.model)
    got = model_weights(spec, "lm", shape)
    layer = 64 * 64 * 4 + 3 * 64 + 3 * 64 * 128 + 2 * 64  # projections with the biases of q, k, v; feed-forward; norms
    assert found == "model=tiny" and got.all.frozen == 2 * layer + 2 * 512 * 64 + 64
    assert got.all.trained_bytes == 4 * got.all.trained, "the adapter is in float32"
    assert [(one.frozen, one.trained_bytes * 2) for one in got.layers] == [(layer, got.all.trained_bytes)] * 2
    assert (got.first.frozen_bytes, got.last.frozen_bytes) == (2 * 512 * 64, 2 * (512 * 64 + 64))
    assert sum(part.bytes for part in (*got.experts, got.tied)) == 0


@pytest.mark.parametrize("words", [(), ("adapter=lora",), ("model=tiny_moe",)])
def test_layers_that_repeat_are_counted_once(
    compose: Any, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    spec = compose("+recipe=sft_demo", *words, *SMALL, "model.layers=11")
    repeated = model_weights(spec, "lm", architecture(spec.model)[0])
    monkeypatch.setattr("runner.tools.plan.rank_layout.sample_depths", lambda *_: (1, 100))
    assert repeated == model_weights(spec, "lm", architecture(spec.model)[0]) and len(repeated.layers) == 11


def test_experts_are_counted_beside_their_layer(compose: Any) -> None:
    spec = compose("+recipe=sft_demo", "model=tiny_moe", *SMALL, "model.experts=8", "model.layers=2")
    got = model_weights(spec, "lm", architecture(spec.model)[0])
    assert [one.trained for one in got.experts] == [8 * 3 * 64 * 128] * 2
    assert got.layers[0].trained < got.experts[0].trained


DEEP = ((), ("model.vocab_size=8192", "model.gradient_checkpointing=2"), ("adapter=lora",))
OTHERS = (
    ("model=tiny_moe",),
    ("model.dtype=bfloat16",),
    ("model.vocab_size=8192",),
    *((f"model.gradient_checkpointing={way}",) for way in ("true", "3", "selective")),
)


@pytest.mark.parametrize(
    "more", [*DEEP, *(pytest.param(words, marks=pytest.mark.slow) for words in OTHERS)], ids=" ".join
)
@pytest.mark.parametrize("headed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_deep_model_lies_on_the_line_through_two_shallow_ones(
    compose: Any, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...], headed: bool
) -> None:
    """Also one whose fullest moment is another than that of the shallow ones."""
    chosen = dict(word.split("=", 1) for word in (*SMALL, "model.layers=11", "algorithm.micro_batch_tokens=256", *more))
    spec = compose("+recipe=sft_demo", *(f"{key}={value}" for key, value in chosen.items()))
    drawn = passes(spec).at_depth(11, headed=headed)
    monkeypatch.setattr(measure, "sample_depths", lambda *_: (1, 100))
    whole = passes(spec).at_depth(11, headed=headed)
    assert (drawn.fullest(), drawn.kept) == (whole.fullest(), whole.kept)
    assert drawn.fullest(10**6) == whole.fullest(10**6)


LATENT = {
    "hidden_size": 64,
    "intermediate_size": 512,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 8,
    "topk_group": 2,
    "first_k_dense_replace": 3,
    "vocab_size": 512,
}


def test_dense_layers_before_those_with_experts_are_not_drawn_through(
    compose: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = compose("+recipe=sft_demo", "data.max_length=64", "algorithm.micro_batch_tokens=64")
    shape = AutoConfig.for_model("deepseek_v3", **LATENT, num_hidden_layers=14)
    drawn = Passes(spec, "lm", shape, on(Mesh())).at_depth(14)
    monkeypatch.setattr(measure, "sample_depths", lambda *_: (1, 100))
    whole = dict(Passes(spec, "lm", shape, on(Mesh())).at_depth(14).peaks)
    whole.pop(measure.BETWEEN)
    assert drawn.peaks == whole


def test_a_cache_of_latents_is_counted_as_each_sampler_keeps_it() -> None:
    shape = AutoConfig.for_model("deepseek_v3", **LATENT, num_hidden_layers=5)
    found = AutoModelForCausalLM.from_config(shape)(torch.zeros(1, 7, dtype=torch.int64), use_cache=True)
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in found.past_key_values.layers) // 7
    assert token_bytes(shape, 4, engine=True) == token_bytes(shape, 4, 2, engine=True) == kept
    assert token_bytes(shape, 4) == kept + 4 * 4 * (24 + 12), "and a layer's keys and values, made of them"
    published = AutoConfig.for_model("deepseek_v3")
    assert token_bytes(published, 2, engine=True) == 70_272
    whole = AutoConfig.for_model("minicpm3", num_hidden_layers=5)
    assert token_bytes(whole, 2, engine=True) == 5 * 40 * (96 + 64) * 2, "vLLM keeps no latents of it"


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("deepseek_v3", "n_routed_experts"),
        ("glm4_moe", "n_routed_experts"),
        ("llama4_text", "num_local_experts"),
        ("mixtral", "num_local_experts"),
        ("qwen3_moe", "num_experts"),
    ],
)
def test_a_rank_has_its_part_of_the_experts_of_every_family(kind: str, name: str) -> None:
    shape = AutoConfig.for_model(kind)
    whole, least = getattr(shape, name), shape.num_experts_per_tok
    for ranks in (2, whole):
        part = expert_parallel_config(shape, ranks)
        assert getattr(part, name) == max(whole // ranks, least) and getattr(part, "n_group", 1) == 1
    assert getattr(shape, name) == whole


def test_routers_are_stored_in_float32_as_in_training(compose: Any) -> None:
    spec = compose("+recipe=sft_demo", "model=tiny_moe", "adapter=lora", "model.dtype=bfloat16", *SMALL)
    shape = architecture(spec.model)[0]
    names = build_meta_model(spec, "lm", shape).module.named_parameters()
    kinds = {name: p.dtype for name, p in names if not p.requires_grad}
    routers = {kind for name, kind in kinds.items() if "gate.base_layer" in name}
    assert routers == {torch.float32} and torch.bfloat16 in kinds.values()
    assert passes(spec).at_depth(2).kept > 0


def test_recomputing_takes_less_and_longer_micro_batches_more(compose: Any) -> None:
    def taken(*more: str) -> int:
        return sum(passes(compose("+recipe=sft_demo", *SMALL, *more)).at_depth(4).fullest().values())

    plain, double = taken("algorithm.micro_batch_tokens=512"), taken("algorithm.micro_batch_tokens=1024")
    ways = [taken("algorithm.micro_batch_tokens=512", f"model.gradient_checkpointing={way}") for way in (2, "true")]
    assert ways[1] < 0.8 * plain and ways[1] < ways[0] < plain
    assert 1.7 * plain < double < 2.1 * plain


def test_ranks_that_share_the_tokens_of_rows_take_their_share(compose: Any) -> None:
    spec = compose("+recipe=sft_demo", *SMALL, "algorithm.micro_batch_tokens=1024")
    alone, shared = (Passes(spec, "lm", architecture(spec.model)[0], on(Mesh(cp=cp))).at_depth(4) for cp in (1, 4))
    assert 3.5 < sum(alone.fullest().values()) / sum(shared.fullest().values()) < 4.2
    assert micro_batch(spec, SHAPE, 4).num_tokens == 256


def test_a_micro_batch_is_full_of_the_longest_rows(compose: Any) -> None:
    spec = compose("+recipe=sft_demo", "data.max_length=100", "algorithm.micro_batch_tokens=250")
    assert micro_batch(spec, SHAPE).rows["lengths"].tolist() == [100, 100, 50]


LONG = ("data.max_length=5000", "model.max_positions=8192")


@pytest.mark.parametrize("budget", ["64", "null"])
def test_a_row_above_the_budget_is_a_micro_batch_of_its_own(compose: Any, budget: str) -> None:
    spec = compose("+recipe=sft_demo", *LONG, f"algorithm.micro_batch_tokens={budget}")
    assert micro_batch(spec, SHAPE).rows["lengths"].tolist() == [5000]
    assert micro_batch(spec, SHAPE, 4).num_tokens == 1250


def test_a_pair_is_not_divided_between_micro_batches(compose: Any) -> None:
    words = ("+recipe=dpo_demo", "data.max_length=100", "algorithm.micro_batch_tokens=150")
    planned = micro_batch(compose(*words), SHAPE)
    pair = PreferencePair((1,), (2,) * 99, (3,) * 99)  # its rows have 100 tokens each
    trained = list(micro_batches(pack_pairs([pair] * 2, share=False), 150))
    assert [one.rows["lengths"].tolist() for one in trained] == [[100, 100]] * 2
    assert planned.rows["lengths"].tolist() == [100, 100]


TURNS = ("+recipe=tool_demo", "init_from=null", "data.max_length=40", "sampler.max_new_tokens=20")


@pytest.mark.parametrize(
    ("words", "longest"),
    [
        (("environment.max_turns=4",), 40 + 4 * 20),
        (("environment=function", "environment.path=shop.py:Shop", "environment.max_turns=4"), 40 + 4 * 20),
        (("environment=function", "environment.path=shop.py:Shop", "environment.max_episode_tokens=300"), 40 + 300),
        (("environment=agent", "environment.command=play", "environment.max_turns=64"), 40 + 64 * 20),
        (("environment.max_turns=1000",), 8192),
        (("environment.max_turns=1000", "sampler=vllm", "sampler.max_model_len=5000"), 5000),
        (("environment=none",), 40 + 20),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else "",
)
def test_the_longest_row_has_all_turns_that_the_model_has_room_for(
    compose: Any, words: tuple[str, ...], longest: int
) -> None:
    assert longest_row_tokens(compose(*TURNS, *words), SHAPE) == longest


def test_storages_are_counted_once_and_until_nobody_holds_them() -> None:
    weight = torch.empty(64, 64, device=META, requires_grad=True)
    tracker = MetaMemoryTracker([weight], vocabulary=7)
    with tracker:
        one = weight * 2  # 16384 bytes
        view = one[:8]
        del one
        wide = torch.empty(3, 7, device=META)  # 84 bytes: a block of 512
        del view, wide
        torch.empty(64, 64, device=META)
    assert tracker.peaks["start"] == {"activations": 16384, "logits": 512, "gradients": 0}


def test_of_a_gradient_its_part_stays() -> None:
    weight = torch.nn.Parameter(torch.empty(64, 64, device=META))
    tracker = MetaMemoryTracker([weight], vocabulary=7)
    handles = keep_gradients([weight], tracker, parts=4, size=4)
    with tracker:
        (weight * 2).sum().backward()  # type: ignore[no-untyped-call]
        torch.empty(128, 64, device=META)
    assert len(handles) == 1 and weight.grad is None
    assert tracker.peaks["start"] == {"activations": 32768, "logits": 0, "gradients": 4096}
