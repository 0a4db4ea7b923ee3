"""Operations of an update: counted by hand for three shapes, by torch for the products, and of shared prompts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig

from runner.adapter import lora
from runner.adapter.config import LoraConfig
from runner.core.auto_choices import Decisions
from runner.core.batch import Batch, pack, with_totals
from runner.core.prefix_tree import Branch, Tree, pack_trees
from runner.model.causal_lm import CausalLM
from runner.model.flops import head_size
from tests.model import zoo

RANK = 4
LENGTHS = (9, 20)  # of rows, of whose tokens all but the first are trained on
TOKENS, LEARNT, VOCAB = 29, 27, 300


def model(kind: str, adapter: bool, **options: Any) -> CausalLM:
    made = zoo.causal(kind, **options)
    return lora.attach(LoraConfig(rank=RANK), made, decide=Decisions()) if adapter else made


def rows() -> Batch:
    batch = pack([[1] * n for n in LENGTHS], [[1.0] * n for n in LENGTHS])
    return with_totals(batch, batch.count())


# Hidden size 32, 4 heads of 8 beside 2 of keys and values, feed-forward layers of 48, 2 layers, 300 tokens known.
ATTENTION = 32 * 32 + 2 * 32 * 16 + 32 * 32
LAYER = ATTENTION + 3 * 32 * 48
EXPERTS = 32 * 4 + 2 * 3 * 32 * 16  # a router over 4, and 2 of them
ADAPTERS = RANK * ((32 + 32) + 2 * (32 + 16) + (32 + 32))  # of the four products of attention
FEED_FORWARD = RANK * 3 * (32 + 48)
ADAPTED_EXPERTS = RANK * (32 + 4) + 2 * RANK * (2 * (32 + 32) + (32 + 16))  # a router and 2 experts
PRODUCTS = ("aten.mm", "aten.addmm", "aten.addmm_")
ALL_PAIRS = 9 * 10 // 2 + 20 * 21 // 2
WINDOWED = (36 + 8) + (36 + 12 * 8)  # of 8 tokens: all of the first 8, then 8 for each


@pytest.mark.parametrize(
    ("kind", "options", "weights", "adapters", "pairs"),
    [
        ("qwen3", {"tie_word_embeddings": True}, 2 * LAYER, 2 * (ADAPTERS + FEED_FORWARD), ALL_PAIRS),
        ("mistral", {}, 2 * LAYER, 2 * (ADAPTERS + FEED_FORWARD), WINDOWED),
        ("qwen3_moe", {}, LAYER + ATTENTION + EXPERTS, 2 * ADAPTERS + ADAPTED_EXPERTS, ALL_PAIRS),
    ],
)
def test_an_update_is_counted_as_by_hand(
    kind: str, options: dict[str, Any], weights: int, adapters: int, pairs: int
) -> None:
    head, attention = VOCAB * 32, 2 * 4 * 32 * pairs  # layers · 4 · width
    full = model(kind, adapter=False, **options).flops.batch_flops(rows())
    assert full == 6 * weights * TOKENS + 6 * head * LEARNT + 3 * attention
    adapted = model(kind, adapter=True, **options).flops.batch_flops(rows())
    assert adapted == (4 * weights + 6 * adapters) * TOKENS + 4 * head * LEARNT + 3 * attention


@pytest.mark.parametrize(("kind", "adapter"), [("llama", False), ("qwen3", True), ("gpt2", False)])
def test_torch_counts_the_same_products(kind: str, adapter: bool) -> None:
    made = model(kind, adapter)
    if adapter:  # so that the gradient goes into the first layer, as it is counted
        made.inner.enable_input_require_grads()
    batch = rows()
    in_place = {torch.ops.aten.addmm_: lambda into, a, b, **_: 2 * a[0] * a[1] * b[1]}  # which torch's counter lacks
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        made.linear_loss(batch, -batch.tokens["weight"])[0].backward()
    found = counter.get_flop_counts()["Global"]
    products = sum(count for operator, count in found.items() if str(operator) in PRODUCTS)
    attention = 3 * made.flops.attention_flops(lambda window: ALL_PAIRS)
    assert products == made.flops.batch_flops(batch) - attention


def test_a_shared_prompt_is_counted_once() -> None:
    prompt, answers = [1] * 10, [[2] * 3, [3] * 5]
    branches = [Branch(ids, {"weight": [1.0] * len(ids)}) for ids in answers]
    shared, alone = (pack_trees([Tree(prompt, branches)], share=share) for share in (True, False))
    flops = zoo.causal("qwen3").flops
    pairs = 10 * 11 // 2 + sum(11 + i for i in range(3)) + sum(11 + i for i in range(5))
    wanted = 6 * 2 * LAYER * 18 + 6 * VOCAB * 32 * 8 + 3 * 2 * 4 * 32 * pairs
    assert flops.batch_flops(with_totals(shared, shared.count())) == wanted
    again = 6 * 2 * LAYER * 10 + 3 * 2 * 4 * 32 * (10 * 11 // 2)
    assert flops.batch_flops(with_totals(alone, alone.count())) == wanted + again


@pytest.mark.parametrize("kind", sorted(zoo.ZOO))
def test_every_architecture_is_counted(kind: str) -> None:
    made = zoo.causal(kind).flops
    assert made.weights.head_trained == VOCAB * 32 and made.weights.trained > 2 * 4 * 32 * 16
    assert sum(width for _, width in made.attention) == 2 * 2 * 32
    assert torch.isfinite(torch.tensor(made.batch_flops(rows())))


def test_heads_of_several_sizes_count_as_the_largest() -> None:
    config = AutoConfig.for_model("gemma4_text", head_dim=8, global_head_dim=16)
    assert config.is_heterogeneous and head_size(config) == 16
