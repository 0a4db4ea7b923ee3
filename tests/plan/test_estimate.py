"""Plans: terms that follow from the mesh, arithmetic done by hand, and what is advised."""

from __future__ import annotations

import json
from typing import Any

import pytest

from runner.parallelism.mesh import Mesh
from runner.plan.advice import advise
from runner.plan.cards import CARDS, GIB, HCCL_BUFFERS, Card
from runner.plan.estimate import Estimate, estimate
from runner.plan.words import drawn, verdict

ONE = ("launch=local", "parallelism=single")
SMALL = ("model.hidden_size=64", "model.intermediate_size=128", "model.layers=2", "data.max_length=64")


def terms(plan: Estimate, phase: str) -> dict[str, int]:
    return {term.name: term.bytes for one in plan.phases if one.name == phase for term in one.terms}


def test_what_a_rank_holds_of_a_sharded_model_is_its_part(compose: Any) -> None:
    alone = estimate(compose("+recipe=sft_demo", *SMALL))
    plan = estimate(compose("+recipe=sft_demo", *SMALL, "parallelism=fsdp", "launch.devices=4"))
    for name in ("weights that learn", "optimizer state"):
        assert terms(plan, "update")[name] == terms(alone, "update")[name] // 4
    model = plan.models["policy"]
    assert terms(plan, "update")["layers gathered from other ranks"] == model.root + 2 * model.layer
    assert terms(plan, "optimizer")["gradients"] == model.trained_bytes // 4


def test_copies_of_a_model_hold_what_one_holds(compose: Any) -> None:
    alone = estimate(compose("+recipe=sft_demo", *SMALL))
    plan = estimate(compose("+recipe=sft_demo", *SMALL, "parallelism=ddp", "launch.devices=4"))
    assert terms(plan, "update") == terms(alone, "update")
    assert plan.work.tokens * 4 == alone.work.tokens
    assert alone.work.sent == 0 and plan.work.sent == 2 * 3 * plan.models["policy"].all.trained_bytes // 4


def test_the_arithmetic_of_an_update(compose: Any) -> None:
    plan = estimate(compose("+recipe=sft_demo", *SMALL, "algorithm.batch_size=8"))
    numbers = plan.models["policy"].total - 512 * 64  # the embedding is looked up
    attention = 2 * 2 * 64 * 64  # layers × width × length, halved for causality
    assert plan.work.tokens == 8 * 64
    assert plan.work.flops == plan.work.tokens * 3 * (2 * numbers + attention)


def test_sampling_holds_keys_and_values_of_its_rows(compose: Any) -> None:
    spec = compose("+recipe=grpo_demo", "init_from=null", "sampler.batch_size=16", "model.layers=2")
    longest = spec.data.max_length + spec.sampler.max_new_tokens
    assert terms(estimate(spec), "sampling")["keys and values"] == 16 * longest * 2 * 2 * spec.model.hidden_size * 4


def test_slices_write_a_share_of_the_answers_each(compose: Any) -> None:
    few = ("init_from=null", "sampler.batch_size=512", "algorithm.batch_size=8", "algorithm.group_size=8")
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
        assert plan.band(card).low == plan.peak.bytes + card.context[0] + count * HCCL_BUFFERS


def test_the_cheapest_change_that_is_enough_is_advised(compose: Any) -> None:
    spec = compose("+recipe=sft_demo", *SMALL, "model.vocab_size=60000", "model.head_chunk_tokens=2048")
    plan = estimate(spec)
    card = Card("toy", "npu", round(1.3 * plan.peak.bytes) - 1, None, (0, 0))
    found = advise(spec, card)
    assert found.fits and [change.word for change in found.changes] == ["model.head_chunk_tokens=1024"]
    assert verdict(card, plan.band(card)) == "may fit" and verdict(card, found.band) == "fits"


def test_what_no_change_can_make_fit_is_said(compose: Any) -> None:
    found = advise(compose("+recipe=sft_demo", *SMALL), Card("toy", "npu", 1000, None, (0, 0)))
    assert not found.fits and found.changes[-1].word == "adapter=lora"


def test_the_mesh_is_drawn_with_its_machines() -> None:
    assert list(drawn(Mesh(dp_replicate=2, dp_shard=2), per_node=2)) == [
        "mesh     dp_replicate=2 × dp_shard=2",
        "  copy 0:  rank 0  1   (machine 0)",
        "  copy 1:  rank 2  3   (machine 1)",
    ]
    assert list(drawn(Mesh(dp_shard=2, tp=2), per_node=2))[1] == "  copy 0:  rank [0 1]  [2 3]   (machines 0 to 1)"


def test_slices_hold_their_part_of_layers_and_logits(compose: Any) -> None:
    wide = (*SMALL, "model.vocab_size=8192", "algorithm.micro_batch_tokens=512")
    alone = estimate(compose("+recipe=sft_demo", *wide))
    plan = estimate(compose("+recipe=sft_demo", *wide, "parallelism=tp", "launch.devices=2"))
    whole, own = terms(alone, "update"), terms(plan, "update")
    norms = 4 * 5 * 64  # two in each layer and one behind them, float32, whole on every rank
    assert own["weights that learn"] == (whole["weights that learn"] + norms) // 2
    assert own["logits"] * 2 == whole["logits"] and own["activations"] < whole["activations"]
    assert plan.models == alone.models and plan.work.flops * 2 == alone.work.flops
    assert plan.work.sent == 2 * 2 * 2 * 2 * plan.work.tokens * 64 * 4 // 2  # layers, reductions, passes, all-reduce


def test_the_verb_plans_a_model_that_is_not_here(command: Any) -> None:
    code, said, _ = command("plan", "+recipe=sft_npu", *ONE, "model.path=Qwen/Qwen2.5-14B-Instruct", "--json")
    plan = json.loads(said)
    assert code == 0 and plan["card"] == "910B" and plan["verdict"] == "fits"
    assert plan["models"]["policy"]["frozen"] == 14_770_033_664
    assert 29 * GIB < plan["peak_bytes"] < 45 * GIB


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--card", "910A"), "no card named '910A'; known are 910B,"),
        (("--card", "H100"), "a H100 is a card of device=cuda, and the job has device=npu"),
        (("model.path=nobody/nothing",), "the shape of nobody/nothing is not known here"),
    ],
)
def test_a_question_that_has_no_answer_is_refused(command: Any, words: tuple[str, ...], said: str) -> None:
    code, _, complaint = command("plan", "+recipe=sft_npu", *words)
    assert code == 2 and said in complaint
