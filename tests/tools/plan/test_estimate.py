"""Plans: terms that follow from the mesh, arithmetic done by hand, and what is advised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from runner.core.batch import pack, with_totals
from runner.core.device_kinds import NPU
from runner.core.errors import SpecError
from runner.device.cards import CARDS, GIB, Card
from runner.model.flops import ModelFlops
from runner.parallelism.mesh import Mesh
from runner.tools.plan.estimate import FRAGMENTATION, Estimate, estimate
from runner.tools.plan.model import architecture, build_meta_model
from runner.tools.plan.plan_text import fit_verdict, mesh_lines, plan_lines
from runner.tools.plan.rank_layout import ModelWeights, ParameterCount
from runner.tools.plan.remedies import (
    advise,
    engine_memory_share,
    quantizing,
    sharding,
    sharing_rows,
    spreading_experts,
)
from runner.tools.plan.rollout_memory import ENGINE, POOL, EngineMemory, SamplerDevices
from tests.tools.plan.test_measure import LATENT, on

ONE = ("launch=local", "parallelism=single")
SMALL = ("model.hidden_size=64", "model.intermediate_size=128", "model.layers=2", "data.max_length=64")


def terms(plan: Estimate, phase: str) -> dict[str, int]:
    return {term.name: term.bytes for one in plan.phases if one.name == phase for term in one.terms}


def test_what_a_rank_holds_of_a_sharded_model_is_its_part(compose: Any) -> None:
    alone = estimate(compose("+recipe=sft_demo", *SMALL))
    plan = estimate(compose("+recipe=sft_demo", *SMALL, "parallelism=fsdp", "launch.devices=4"))
    for name in ("trainable weights", "optimizer state"):
        assert terms(plan, "update")[name] == terms(alone, "update")[name] // 4
    model = plan.models["policy"]
    assert terms(plan, "update")["layers gathered by FSDP"] == (model.first + model.last + model.layers[0] * 2).bytes
    assert terms(plan, "optimizer")["gradients"] == model.all.trained_bytes // 4


def test_unsharded_gradients_wait_for_the_last_micro_batch_where_the_card_has_room(compose: Any) -> None:
    words = ("+recipe=sft_demo", *SMALL, "parallelism=fsdp", "launch.devices=2", "algorithm.micro_batch_tokens=64")
    spec = compose(*words)
    each, once = estimate(spec), estimate(spec, CARDS["910B"])
    weights, cuts = each.models["policy"], each.work.micro_batches
    waiting = terms(once, "update")["gradients before their sum"]
    assert cuts > 1 and waiting == 4 * weights.all.trained
    assert "gradients before their sum" not in terms(each, "update")
    gathered = weights.all.bytes + weights.layers[0].bytes  # the first layer twice, the second once
    assert each.work.sending["weights and gradients"] == cuts * (gathered + waiting) // 2
    assert once.work.sending["weights and gradients"] == (cuts * gathered + waiting) // 2
    assert estimate(compose(*words, "parallelism.cpu_offload=true", "device=npu"), CARDS["910B"]).work.sending == (
        estimate(compose(*words, "device=npu")).work.sending
    )


def test_copies_of_a_model_hold_what_one_holds(compose: Any) -> None:
    alone = estimate(compose("+recipe=sft_demo", *SMALL))
    plan = estimate(compose("+recipe=sft_demo", *SMALL, "parallelism=ddp", "launch.devices=4"))
    assert terms(plan, "update") == terms(alone, "update")
    assert plan.work.tokens * 4 == alone.work.tokens
    assert alone.work.sent_bytes == 0 and plan.work.sent_bytes == 2 * 3 * plan.models["policy"].all.trained_bytes // 4


def test_the_arithmetic_of_an_update(compose: Any) -> None:
    plan = estimate(compose("+recipe=sft_demo", *SMALL, "algorithm.batch_size=8"))
    layers, head = 2 * (4 * 64 * 64 + 3 * 64 * 128), 512 * 64  # the embedding is looked up
    attention = 2 * 4 * 64 * 64 * 65 // 2  # layers · 4 · width, for each pair that the causal mask leaves of a row
    assert plan.work.tokens == 8 * 64
    assert plan.work.flops == 3 * (2 * layers * 8 * 64 + 2 * head * 8 * 63 + 8 * attention)
    assert plan.work.recomputed_flops == 0


@pytest.mark.parametrize("adapter", ["none", "lora"])
@pytest.mark.parametrize("kind", ["tiny", "tiny_moe"])
def test_a_plan_counts_what_a_run_counts(compose: Any, kind: str, adapter: str) -> None:
    own = (f"model={kind}", f"adapter={adapter}", "model.layers=7", "algorithm.batch_size=8")
    words = (*(word for word in SMALL if "layers" not in word), *own)
    spec = compose("+recipe=sft_demo", *words)
    batch = pack([[0] * 64] * 8, [[1.0] * 64] * 8)
    model = build_meta_model(spec, "lm", architecture(spec.model)[0])
    counted = model.flops.batch_flops(with_totals(batch, batch.count()))
    assert estimate(spec).work.flops == pytest.approx(counted, rel=1e-12)


def test_what_is_longer_than_a_micro_batch_is_counted_whole(compose: Any) -> None:
    words = (*SMALL, "init_from=null", "algorithm.batch_size=8", "parallelism=pp", "launch.devices=2")
    rows, whole = (
        estimate(compose("+recipe=sft_demo", *words, f"algorithm.micro_batch_tokens={size}")) for size in (32, 64)
    )
    assert rows.phases == whole.phases and rows.work == whole.work and rows.work.micro_batches == 8
    pairs, both = (
        estimate(compose("+recipe=dpo_demo", *words, f"algorithm.micro_batch_tokens={size}")) for size in (64, 128)
    )
    assert pairs.phases == both.phases and pairs.work.micro_batches == 8 and pairs.work.tokens == 8 * 128


def test_what_is_recomputed_is_counted_apart(compose: Any) -> None:
    words = ("+recipe=sft_demo", *SMALL, "algorithm.batch_size=8")
    whole, half = (estimate(compose(*words, f"model.gradient_checkpointing={way}")) for way in ("true", "selective"))
    layers = 2 * (4 * 64 * 64 + 3 * 64 * 128)
    assert half.work.recomputed_flops == whole.work.tokens * layers
    assert whole.work.recomputed_flops == whole.work.tokens * 2 * layers + 8 * 2 * 4 * 64 * 64 * 65 // 2
    assert whole.work.flops == half.work.flops == estimate(compose(*words)).work.flops


def test_sampling_holds_keys_and_values_of_its_rows(compose: Any) -> None:
    few = ("sampler.max_num_seqs=16", "data.max_length=40", "model.layers=2")
    spec = compose("+recipe=grpo_demo", "init_from=null", *few)
    longest = spec.data.max_length + spec.sampler.max_new_tokens
    assert terms(estimate(spec), "sampling")["keys and values"] == 16 * longest * 2 * 2 * spec.model.hidden_size * 4


def test_an_episode_of_several_turns_is_counted_whole(compose: Any) -> None:
    words = (*SMALL[:3], "+recipe=tool_demo", "init_from=null", "data.max_length=40", "sampler.max_new_tokens=8")
    slow = Card("toy", "cuda", GIB, {"float32": 1e30}, (0, 0), bandwidth=1.0)
    one, four = (
        estimate(spec := compose(*words, "sampler.max_num_seqs=16", *more), slow)
        for more in (("environment=none",), ("environment.max_turns=4",))
    )
    held = [terms(plan, "sampling")["keys and values"] for plan in (one, four)]
    assert held == [16 * longest * 2 * 2 * 64 * 4 for longest in (40 + 8, 40 + 4 * 8)]
    assert four.work.tokens * 48 == one.work.tokens * 72 and four.work.flops > one.work.flops * 72 / 48
    assert four.sampling_s == one.sampling_s * 4, "of each turn all tokens but the first"  # type: ignore[operator]
    note = "the environment's messages, which may lengthen an episode up to the model's limit"
    assert (one.left_out, four.left_out) == ([], [note])
    assert f"note     not counted: {note}" in plan_lines(spec, four, slow, None)
    bounded = compose(
        *words, "environment=function", "environment.path=shop.py:Shop", "environment.max_episode_tokens=99"
    )
    assert estimate(bounded).left_out == []


OWN = ("init_from=null", "model.layers=2", "sampler.max_num_seqs=16")


def test_devices_that_only_sample_hold_what_the_ranks_no_longer_do(compose: Any) -> None:
    alone = estimate(compose("+recipe=grpo_demo", *OWN))
    plan = estimate(compose("+recipe=grpo_demo", *OWN, "launch.samplers=2"))
    assert [phase.name for phase in plan.phases] == ["update", "optimizer"] and plan.samplers is not None
    model, sampling = plan.models["policy"].all.bytes, terms(alone, "sampling")
    held = {term.name: term.bytes for term in plan.samplers.terms}
    assert held == {"weights": model, "keys and values": sampling["keys and values"], "logits": sampling["logits"]}
    assert [term.bytes for term in plan.shelf] == [model] and alone.shelf == []
    few = estimate(compose("+recipe=grpo_demo", *OWN[:2], "launch.samplers=2", "algorithm.batch_size=2"))
    assert {term.name: term.bytes for term in few.samplers.terms}["keys and values"] * 2 == sampling["keys and values"]  # type: ignore[union-attr]


@pytest.mark.slow
def test_versions_of_a_lag_wait_on_the_host_where_others_sample(compose: Any) -> None:
    ahead = (*OWN, "adapter=lora", "algorithm.lag=1")
    here = estimate(compose("+recipe=grpo_demo", *ahead))
    plan = estimate(compose("+recipe=grpo_demo", *ahead, "launch.samplers=1"))
    learnt = plan.models["policy"].all.trained_bytes
    assert terms(here, "update")["weight versions for algorithm.lag"] == 2 * learnt
    assert "weight versions for algorithm.lag" not in terms(plan, "update")
    assert [term.bytes for term in plan.shelf] == [2 * learnt]


def test_the_least_that_sampling_takes(compose: Any) -> None:
    spec = compose("+recipe=grpo_demo", *OWN, "algorithm.batch_size=4")  # 32 answers of 8 tokens, 16 at once
    numbers = 2 * (4 * 128 * 128 + 3 * 128 * 384) + 512 * 128  # layers, LM head; the embedding is looked up
    slow = Card("toy", "cuda", GIB, {"float32": 1e30}, (0, 0), bandwidth=1.0)
    assert estimate(spec, slow).sampling_s == 7 * 2 * numbers * 4
    busy = Card("toy", "cuda", GIB, {"float32": 1.0}, (0, 0), bandwidth=1e30)
    assert estimate(spec, busy).sampling_s == 7 * 2 * numbers * 32
    assert estimate(spec, CARDS["910B"]).sampling_s is None


def engine(plan: Estimate) -> EngineMemory:
    assert plan.engine is not None
    return plan.engine


VLLM = (*OWN, "sampler=vllm")
TOY = Card("toy", "cuda", GIB, {"float32": 1.0}, (0, 0), bandwidth=1.0)


def test_an_engine_beside_a_rank_takes_its_share_of_the_card_while_it_is_awake(compose: Any) -> None:
    words = ("+recipe=grpo_demo", *VLLM, "device=cuda", "model.dtype=float32", "checkpoint.asynchronous=false")
    words += ("sampler.gpu_memory_utilization=0.5",)
    asleep, awake = (estimate(compose(*words, f"sampler.sleep={level}"), TOY) for level in (1, 0))
    model = asleep.models["policy"].all.bytes
    pool = GIB // 2 - model
    held = {ENGINE: model, POOL: pool}
    assert {name: taken for name, taken in terms(asleep, "sampling").items() if "engine" in name} == held
    assert held.items() <= terms(awake, "update").items() and not held.keys() & terms(asleep, "update").keys()
    assert [term.bytes for term in asleep.host] == [model] and awake.host == [] == asleep.shelf
    longest = 1024 + 8
    assert engine(asleep).rows == pool // (longest * 2 * 2 * 128 * 4) and engine(asleep).wanted == 16
    loose = asleep.peak.bytes - asleep.peak.pooled_bytes
    assert asleep.peak.pooled_bytes == GIB // 2 and asleep.band(TOY).high == round(FRAGMENTATION * loose) + GIB // 2


def test_an_engine_that_would_lose_its_experts_is_refused_before_there_is_a_card(compose: Any) -> None:
    words = ("+recipe=grpo_demo", "model=tiny_moe", "sampler=vllm", "device=npu")
    with pytest.raises(SpecError, match="experts' layout is lost after sleep"):
        estimate(compose(*words))
    assert engine(estimate(compose(*words, "sampler.sleep=0"))).rows


@pytest.mark.slow
def test_an_engine_over_two_devices_has_half_of_the_model_on_each(compose: Any) -> None:
    words = ("+recipe=grpo_demo", *VLLM, "device=cuda", "launch.samplers=4")
    one, two = (estimate(compose(*words, f"sampler.tensor_parallel_size={tp}"), TOY) for tp in (1, 2))
    assert engine(two).weights * 2 == engine(one).weights and (one.samplers.count, two.samplers.count) == (4, 2)  # type: ignore[union-attr]
    assert engine(two).rows > 2 * engine(one).rows, "and more room beside it"
    assert two.sampler_band(TOY).high == pytest.approx(0.9 * GIB, abs=1)  # type: ignore[union-attr]


def test_an_engine_without_room_for_an_answer_does_not_fit(compose: Any) -> None:
    words = ("+recipe=grpo_demo", *VLLM, "device=cuda", "launch.samplers=1")
    model = estimate(compose(*words), TOY).models["policy"].all.bytes
    small = Card("toy", "cuda", round(model * 1.2), {}, (0, 0))
    spec = compose(*words, "sampler.gpu_memory_utilization=0.5")
    plan = estimate(spec, small)
    assert engine(plan).rows == 0 and fit_verdict(plan, small) == "does not fit"
    assert "sampler.gpu_memory_utilization=0.9" in [change.word for change in engine_memory_share(spec)]
    [said] = [line for line in plan_lines(spec, plan, small, None) if "raise sampler.gpu_memory_utilization" in line]
    assert "room for 0 sequences" in said


NF4 = "model.quantization=nf4"


def test_a_quantized_base_is_held_with_its_scales_and_one_dequantized_weight(compose: Any) -> None:
    sizes = ("model.hidden_size=512", "model.intermediate_size=2048", "model.layers=3", "data.max_length=16")
    words = (*sizes, "algorithm.micro_batch_tokens=16", "model.lm_head_chunk_tokens=1", "adapter=lora")
    plain, low = (estimate(compose("+recipe=sft_demo", *words, *more)) for more in ((), ("model.quantization=int8",)))
    numbers, rows = 3 * (4 * 512 + 3 * 2048) * 512, 3 * (5 * 512 + 2 * 2048)
    less = terms(plain, "update")["frozen weights"] - terms(low, "update")["frozen weights"]
    assert less == numbers * 4 - (numbers + 4 * rows)
    assert low.peak.bytes - (plain.peak.bytes - less) == pytest.approx(512 * 2048 * 4, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "card", "more", "frozen_gib", "verdict"),
    [
        ("Qwen/Qwen3-8B", "910B", ("device=npu",), 15.3, "fits"),  # 2 bytes for each of 8.19 billion numbers
        ("Qwen/Qwen3-8B", "H100", ("device=cuda",), 15.3, "fits"),
        ("Qwen/Qwen3-32B", "910B", ("device=npu",), 61.0, "does not fit"),
        ("Qwen/Qwen3-32B", "H100", ("device=cuda",), 61.0, "may fit"),
        ("Qwen/Qwen3-32B", "H100", ("device=cuda", NF4), 19.25, "fits"),
        # 68.5 billion numbers in layers, each of 4 bits and 1/64 of a float32 scale; 2.1 in embedding and head
        ("meta-llama/Llama-3.1-70B", "H100", ("device=cuda", NF4), 39.8, "fits"),
    ],
)
def test_what_lora_of_published_models_keeps_on_one_card(
    compose: Any, model: str, card: str, more: tuple[str, ...], frozen_gib: float, verdict: str
) -> None:
    spec = compose("+recipe=sft_npu", *ONE, f"model.path={model}", *more)
    plan = estimate(spec, CARDS[card])
    assert terms(plan, "update")["frozen weights"] / GIB == pytest.approx(frozen_gib, rel=0.01)
    assert fit_verdict(plan, CARDS[card]) == verdict
    assert [change.word for change in quantizing(spec)] == ([NF4] if card == "H100" and NF4 not in more else [])


@pytest.mark.slow
def test_what_samplers_read_is_what_a_step_changes(compose: Any) -> None:
    words = ("+recipe=grpo_demo", *VLLM, "device=cuda", "launch.samplers=1", "adapter=lora", "algorithm.lag=1")
    merged, alone = (estimate(compose(*words, f"sampler.weight_sync={way}"), TOY) for way in ("merged", "adapter"))
    model = merged.models["policy"]
    layers = sum(part.frozen_bytes for part in model.layers)
    assert [term.bytes for term in merged.shelf] == [model.all.frozen_bytes + layers]
    sent = 2 * model.all.trained  # bytes: an adapter is sent in bfloat16, which the engine computes in
    assert [term.bytes for term in alone.shelf] == [model.all.frozen_bytes + 2 * sent]
    assert engine(alone).weights == model.all.frozen_bytes + sent and engine(merged).weights == model.all.frozen_bytes


def test_slices_write_a_share_of_the_answers_each(compose: Any) -> None:
    few = ("init_from=null", "sampler.max_num_seqs=512", "algorithm.batch_size=8", "algorithm.group_size=8")
    alone = estimate(compose("+recipe=grpo_demo", *few))
    plan = estimate(compose("+recipe=grpo_demo", *few, "parallelism=tp", "launch.devices=2"))
    assert terms(plan, "sampling")["keys and values"] * 2 == terms(alone, "sampling")["keys and values"]


def test_a_reference_is_a_copy_where_there_is_no_adapter(compose: Any) -> None:
    spec = compose("+recipe=dpo_demo", "init_from=null")
    plan = estimate(spec)
    assert terms(plan, "update")["reference"] == plan.models["policy"].all.trained_bytes
    adapted = estimate(compose("+recipe=dpo_demo", "init_from=null", "adapter=lora"))
    assert "reference" not in terms(adapted, "update")


def test_the_band_counts_what_communicators_keep(compose: Any) -> None:
    card = CARDS["910B"]
    alone = estimate(compose("+recipe=sft_demo", *SMALL))
    assert alone.band(card).low == alone.peak.bytes + card.context[0]
    for name, count in {"ddp": 1, "fsdp": 1, "hsdp": 3}.items():  # copies, pieces, all
        plan = estimate(compose("+recipe=sft_demo", *SMALL, f"parallelism={name}", "launch.devices=4"))
        assert plan.band(card).low == plan.peak.bytes + card.context[0] + count * NPU.communicator_bytes


def test_the_cheapest_change_that_is_enough_is_advised(compose: Any) -> None:
    spec = compose("+recipe=sft_demo", *SMALL, "model.vocab_size=60000", "model.lm_head_chunk_tokens=2048")
    plan = estimate(spec)
    card = Card("toy", "npu", round(1.3 * plan.peak.bytes) - 1, None, (0, 0))
    found = advise(spec, card)
    assert found.fits and [change.word for change in found.changes] == ["model.lm_head_chunk_tokens=1024"]
    assert fit_verdict(plan, card) == "may fit" and fit_verdict(estimate(found.changes[-1].spec), card) == "fits"


def fitting(spec: Any, part: float) -> Card:
    """A card that has this part of what the job needs at most."""
    return Card("toy", "cuda", round(part * FRAGMENTATION * estimate(spec).peak.bytes), None, (0, 0))


def test_long_rows_are_shared_and_experts_spread_where_that_is_enough(compose: Any) -> None:
    four = ("launch.devices=4", "parallelism=ddp", "algorithm.micro_batch_tokens=64", "model.vocab_size=512")
    rows = compose("+recipe=sft_demo", *SMALL[:3], *four, "data.max_length=64", "model.lm_head_chunk_tokens=64")
    change = next(sharing_rows(rows))
    assert change.word == "parallelism.cp=2" and str(change.spec.parallelism.mesh(4)) == "dp_replicate=2 × cp=2"
    many = ("model=tiny_moe", "model.experts=64", *SMALL, "launch.devices=4", "parallelism=ddp")
    spread = [change.word for change in spreading_experts(compose("+recipe=sft_demo", *many))]
    assert spread == ["parallelism.ep=2", "parallelism.ep=4"]
    found = advise(one := compose("+recipe=sft_demo", *many, "algorithm.micro_batch_tokens=64"), fitting(one, 0.75))
    assert found.fits and [change.word for change in found.changes] == ["parallelism.ep=2"]


def test_several_machines_share_out_layers_before_layers_travel_between_them(compose: Any) -> None:
    words = (
        "parallelism=ddp",
        "launch.devices=2",
        "launch.nodes=2",
        "launch.node_rank=0",
        "launch.rdzv_endpoint=a:29400",
    )
    offered = [change.word for change in sharding(compose("+recipe=sft_demo", *SMALL, *words))]
    assert offered == ["parallelism=fsdp parallelism.pp=2", "parallelism=fsdp"]


def test_what_no_change_can_make_fit_is_said(compose: Any) -> None:
    found = advise(compose("+recipe=sft_demo", *SMALL), Card("toy", "npu", 1000, None, (0, 0)))
    assert not found.fits and found.changes[-1].word == "adapter=lora"


def test_the_mesh_is_drawn_with_its_machines() -> None:
    assert list(mesh_lines(Mesh(dp_replicate=2, dp_shard=2), per_node=2)) == [
        "mesh     dp_replicate=2 × dp_shard=2",
        "  replica 0:  rank 0  1   (machine 0)",
        "  replica 1:  rank 2  3   (machine 1)",
    ]
    both = mesh_lines(Mesh(pp=2, dp_shard=2, cp=2, tp=2), per_node=8)
    assert list(both)[1:] == [
        "  stage 0:  rank [( 0  1) ( 2  3)]  [( 4  5) ( 6  7)]   (machine 0)",
        "  stage 1:  rank [( 8  9) (10 11)]  [(12 13) (14 15)]   (machine 1)",
        "  [ ] context parallel: share the tokens of each sequence",
        "  ( ) tensor parallel: share every layer",
    ]
    assert (
        list(mesh_lines(Mesh(dp_replicate=4, ep=2), per_node=4))[-1]
        == "  experts of a layer are split over ranks 0 1 | 2 3"
    )
    lines = list(mesh_lines(Mesh(dp_shard=2, tp=2), per_node=2))
    assert lines[1] == "  replica 0:  rank (0 1)  (2 3)   (machines 0 to 1)"


def test_what_only_samples_is_drawn_beside_the_mesh() -> None:
    assert list(mesh_lines(Mesh(dp_replicate=2), None, SamplerDevices(4, 2, ())))[0:] == [
        "mesh     dp_replicate=2, and 4 for sampling",
        "  replica 0:  rank 0",
        "  replica 1:  rank 1",
        "  sampler 0:  device (2 3)",
        "  sampler 1:  device (4 5)",
    ]


def test_slices_hold_their_part_of_layers_and_logits(compose: Any) -> None:
    wide = (*SMALL, "model.vocab_size=8192", "algorithm.micro_batch_tokens=512")
    alone = estimate(compose("+recipe=sft_demo", *wide))
    plan = estimate(compose("+recipe=sft_demo", *wide, "parallelism=tp", "launch.devices=2"))
    whole, own = terms(alone, "update"), terms(plan, "update")
    norms = 4 * 5 * 64  # two in each layer and one behind them, float32, replicated on every rank
    assert own["trainable weights"] == (whole["trainable weights"] + norms) // 2
    assert own["logits"] * 2 == whole["logits"] and own["activations"] < whole["activations"]
    assert plan.models == alone.models and plan.work.flops * 2 == alone.work.flops
    assert (
        plan.work.sent_bytes == 2 * 2 * 2 * 2 * plan.work.tokens * 64 * 4 // 2
    )  # layers, reductions, passes, all-reduce


PP = ("parallelism=pp", "launch.devices=2", "model.layers=6", "algorithm.micro_batch_tokens=64")


def test_stages_share_out_layers_and_the_first_keeps_most_micro_batches(compose: Any) -> None:
    words = (*(word for word in SMALL if "layers" not in word), *PP, "algorithm.batch_size=8")
    plan = estimate(compose("+recipe=sft_demo", *words))
    model = plan.models["policy"]
    assert plan.stage.layers == [0, 1, 2] and plan.stage.first and not plan.stage.last
    assert terms(plan, "update")["trainable weights"] == (model.first + model.layers[0] * 3).bytes
    assert "activations of micro-batches in flight" in terms(plan, "update")
    assert plan.work.bubble == 1 / (8 + 1) and plan.work.micro_batches == 8
    hidden = 8 * 64 * 64 * 4
    assert plan.work.sending["stages"] == hidden, "forward alone: nothing comes before the first stage"


def test_what_a_stage_has_of_tied_weights_and_of_several_runs() -> None:
    layer, end, tied = (
        ParameterCount(trained=1, trained_bytes=4),
        ParameterCount(trained=3, trained_bytes=12),
        ParameterCount(trained=2, trained_bytes=8),
    )
    model = ModelWeights((layer,) * 7, (ParameterCount(),) * 7, first=tied, last=end, tied=tied, flops=ModelFlops())
    first, last = (spread := on(Mesh(pp=2), chunks=2)).stages(7)
    assert (first.runs, last.runs) == ([(0, 2), (4, 6)], [(2, 4), (6, 7)])
    assert (
        spread.rank_share(model, first) == tied + layer * 4 and spread.rank_share(model, last) == end + tied + layer * 3
    )
    assert [one.runs_in_flight(2, 100) for one in (first, last)] == [5, 3] and first.runs_in_flight(2, 1) == 2
    assert [one.runs_in_flight(4, 100) for one in on(Mesh(pp=4)).stages(7)] == [4, 3, 2, 1]


def test_ranks_that_share_rows_hold_whole_copies_or_pieces_of_all_of_them(compose: Any) -> None:
    alone = estimate(compose("+recipe=sft_demo", *SMALL))
    shared = estimate(compose("+recipe=sft_demo", *SMALL, "parallelism=cp", "launch.devices=2"))
    whole, own = terms(alone, "update"), terms(shared, "update")
    assert own["trainable weights"] == whole["trainable weights"]
    assert own["activations"] < 0.6 * whole["activations"] and own["rows exchanged"] > 0
    assert shared.work.flops * 2 == alone.work.flops and shared.work.tokens == alone.work.tokens
    layers, passes, heads = 2, 2, 2 * (4 + 4) * 16 * 4  # queries, keys, values and what attention gives; bytes a token
    assert shared.work.sending["rows"] == layers * passes * heads * (shared.work.tokens // 2) // 2
    pieces = estimate(compose("+recipe=sft_demo", *SMALL, "parallelism=fsdp", "parallelism.cp=2", "launch.devices=4"))
    assert terms(pieces, "update")["trainable weights"] == whole["trainable weights"] // 4


@pytest.mark.parametrize("words", ["parallelism=ep", "parallelism=fsdp parallelism.ep=2"])
def test_experts_lie_over_ranks(compose: Any, words: str) -> None:
    plan = estimate(compose("+recipe=sft_demo", "model=tiny_moe", *SMALL, *words.split(), "launch.devices=4"))
    model, held = plan.models["policy"], terms(plan, "update")
    experts = sum(part.bytes for part in model.experts)
    plain = model.all.bytes - experts
    assert held["trainable weights"] == experts // 4 + (plain if words == "parallelism=ep" else plain // 4)
    assert held["tokens sent to experts"] > 0
    ep = plan.mesh.ep
    assert plan.work.sending["experts"] == 2 * 2 * 2 * 2 * plan.work.tokens * 64 * 4 * (ep - 1) // ep
    assert any("evenly used experts" in line for line in plan_lines(compose("+recipe=sft_demo"), plan, None, None))


def test_a_family_that_names_its_experts_otherwise_is_planned_and_spread(compose: Any, tmp_path: Path) -> None:
    AutoConfig.for_model("deepseek_v3", **LATENT, num_hidden_layers=5).save_pretrained(tmp_path)
    words = ("+recipe=sft_full_npu", f"model.path={tmp_path}", "data.max_length=64", "launch=local", "launch.devices=4")
    spec = compose(*words, "parallelism=ddp")
    assert [change.word for change in spreading_experts(spec)] == ["parallelism.ep=2", "parallelism.ep=4"]
    whole, plan = estimate(spec), estimate(compose(*words, "parallelism=ep"))
    experts = sum(part.bytes for part in whole.models["policy"].experts)
    held = [terms(one, "update")["trainable weights"] for one in (whole, plan)]
    assert experts > 0 and held[0] - held[1] == experts - experts // 4


def test_a_family_that_fails_without_data_is_refused_in_a_line(compose: Any, tmp_path: Path) -> None:
    small = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    gemma = small | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 64}
    for kind, sizes, why in (("mamba", small, "it has no attention heads"), ("gemma2", gemma, r"\w+: .*")):
        AutoConfig.for_model(kind, **sizes).save_pretrained(tmp_path)
        words = ("+recipe=sft_full_npu", f"model.path={tmp_path}", "parallelism=single", "launch=local")
        with pytest.raises(SpecError, match=rf"run plan does not support model_type={kind} \({why}\); plan another"):
            estimate(compose(*words))


def test_adapters_on_experts_are_planned_for_but_not_where_experts_lie_apart(compose: Any) -> None:
    words = ("+recipe=sft_demo", "model=tiny_moe", *SMALL, "adapter=lora")
    model = estimate(compose(*words)).models["policy"]
    assert all(part.trained > 0 for part in model.experts)
    with pytest.raises(SpecError, match=r"adapter\.targets=\[q_proj,k_proj,v_proj,o_proj\]"):
        estimate(compose(*words, "parallelism=ep", "launch.devices=2"))


def test_what_waits_on_the_host_is_said(compose: Any) -> None:
    words = (
        "device=npu",
        "model.dtype=float32",
        "parallelism=fsdp",
        "parallelism.cpu_offload=true",
        "launch.devices=2",
    )
    more = ("model.gradient_checkpointing=true", "model.activation_offloading=true", "checkpoint.asynchronous=true")
    plan = estimate(compose("+recipe=sft_demo", *SMALL, *words, *more))
    assert "trainable weights" not in terms(plan, "update") and terms(plan, "optimizer") == {}
    learnt = plan.models["policy"].all.trained_bytes // 2
    inputs = 2 * 4096 * 64 * 4  # layers, tokens, width
    assert [term.bytes for term in plan.host] == [pytest.approx(4 * learnt, rel=0.01), inputs, 3 * learnt]


def test_sizes_that_do_not_divide_are_refused_as_by_the_job(command: Any) -> None:
    code, _, complaint = command("plan", "+recipe=sft_npu", "parallelism=tp", "launch.devices=3")
    assert code == 2 and "3 does not divide num_attention_heads=28" in complaint
    assert command("plan", "+recipe=sft_npu", "parallelism=pp", "launch.devices=29")[0] == 2


def test_the_verb_plans_a_model_that_is_not_here(command: Any) -> None:
    code, said, _ = command("plan", "+recipe=sft_npu", *ONE, "model.path=Qwen/Qwen2.5-14B-Instruct", "--json")
    plan = json.loads(said)
    assert code == 0 and plan["card"] == "910B" and plan["verdict"] == "fits"
    assert plan["models"]["policy"]["frozen"] == 14_770_033_664
    assert 29 * GIB < plan["peak_bytes"] < 45 * GIB


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--card", "910A"), "no card named '910A'; known cards: 910B,"),
        (("--card", "H100"), "H100 is a card of device=cuda, but the job has device=npu"),
        (("model.path=nobody/nothing",), "the shape of nobody/nothing is not known here"),
        (("model.path=/models/gone",), "the shape of /models/gone is not known here: no such folder\n"),
    ],
)
def test_a_question_that_has_no_answer_is_refused(command: Any, words: tuple[str, ...], said: str) -> None:
    code, _, complaint = command("plan", "+recipe=sft_npu", *words)
    assert code == 2 and said in complaint


@pytest.mark.parametrize(
    ("config", "code", "said"),
    [
        ({"model_type": "qwen2_5_omni"}, 2, "which is a model of text, images, sound and video, of which"),
        ({"model_type": "t5"}, 2, "model_type=t5, which is an encoder-decoder"),
        ({"model_type": "new_model"}, 2, "model type `new_model`"),
        ({"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.C"}}, 8, "(model_type=theirs) contains Python"),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else "",
)
def test_a_model_of_another_kind_has_no_plan(
    config: dict[str, Any], code: int, said: str, command: Any, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    ended, _, complaint = command("plan", "+recipe=sft_npu", f"model.path={tmp_path}")
    assert ended == code and said in complaint and len(complaint.replace(str(tmp_path), "")) < 400
