"""A prompt that is computed once gives what repeating it gives: outputs and gradients, in every layout."""

from __future__ import annotations

import os
import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from itertools import accumulate
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

from runner.core.batch import Batch
from runner.core.prefix_tree import Branch, Tree, pack_trees
from runner.model import checkpointing_and_compile
from runner.model.packed_attention import plan_attention
from runner.model.value_head import ScalarHeadModel
from tests.command import ROOT
from tests.model.test_causal_lm import causal
from tests.model.test_compiled import made, traced  # noqa: F401  (a fixture)
from tests.model.zoo import VOCAB, gradients, relative

NEEDS = frozenset({"logprobs", "entropy"})


def trees(temperature: bool) -> list[Tree]:
    generator = torch.Generator().manual_seed(2)

    def ids(count: int) -> list[int]:
        return torch.randint(0, VOCAB, (count,), generator=generator).tolist()

    def branch(count: int) -> Branch:
        channels = {"weight": [1.0] * count} | ({"temperature": [0.7] * count} if temperature else {})
        return Branch(ids(count), channels)

    return [Tree(ids(p), [branch(n) for n in lengths]) for p, lengths in ((9, (3, 12, 1)), (1, (5,)), (14, (2, 2)))]


def learnt(batch: Batch, values: Tensor) -> Tensor:
    """The values of the branches' tokens, which lie in the same order with and without sharing."""
    return values[batch.tokens["weight"] > 0]


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama", "mistral", "gemma2"])
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_shared_prompts_change_no_number(kind: str, layout: str) -> None:
    model = causal(kind, batch_layout=layout)
    found = []
    for share in (True, False):
        batch = pack_trees(trees(temperature=False), share=share)
        out = model.outputs(batch, NEEDS)
        total = (learnt(batch, out["logprobs"]).sin() + 0.3 * learnt(batch, out["entropy"])).sum()
        grads = torch.autograd.grad(total, list(model.trainable().values()))
        found.append(([learnt(batch, out[name]).detach() for name in sorted(NEEDS)], grads))
    torch.testing.assert_close(found[0][0], found[1][0], atol=2e-5, rtol=2e-5)
    for one, two in zip(found[0][1], found[1][1], strict=True):
        assert float((one - two).norm()) <= 1e-5 * float(two.norm()) + 1e-7


def loss_gradients(model: Any, share: bool) -> dict[str, Tensor]:
    """Of the mean over the branches' tokens, by name; and the loss."""
    batch = pack_trees(trees(temperature=False), share=share)
    weight = batch.tokens["weight"]
    model.module.zero_grad()
    total = model.linear_loss(batch, weight / weight.sum())[0]
    total.backward()
    return {n: p.grad for n, p in model.trainable().items() if p.grad is not None} | {"loss": total.detach()}


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama", "granite", "qwen3_moe", "gpt2"])
def test_merged_parts_are_the_attention_of_repeated_prompts(kind: str) -> None:
    model = causal(kind) if kind == "gpt2" else causal(kind, initializer_range=0.02)
    assert relative(loss_gradients(model, True), loss_gradients(model, False)) < 1e-6


lengths_strategy = st.lists(
    st.tuples(st.integers(0, 9), st.lists(st.integers(1, 7), min_size=1, max_size=4)), min_size=1, max_size=4
)


@given(lengths=lengths_strategy, kv_heads=st.sampled_from([1, 2, 4]), window=st.none() | st.integers(1, 20))
@settings(max_examples=40, deadline=None)
def test_attention_equals_that_over_copies_of_the_prompt(
    lengths: list[tuple[int, list[int]]], kv_heads: int, window: int | None
) -> None:
    torch.manual_seed(len(lengths))
    batch = pack_trees([Tree([0] * prompt, [Branch([0] * n) for n in branches]) for prompt, branches in lengths])
    plan = plan_attention(batch)
    assert (plan.prompts is None) == all(prompt == 0 for prompt, _ in lengths)
    inputs = [
        torch.randn(1, n, batch.num_tokens, 8, dtype=torch.float64).requires_grad_() for n in (4, kv_heads, kv_heads)
    ]
    got, wanted = (one.attend(*inputs, window, 0.0, 0.3) for one in (plan, replace(plan, prompts=None)))
    torch.testing.assert_close(got, wanted)
    c = torch.randn_like(got)
    torch.testing.assert_close(*(torch.autograd.grad((one * c).sum(), inputs) for one in (got, wanted)))


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    ("way", "backend"), [("selective", "eager"), pytest.param(True, "aot_eager", marks=pytest.mark.slow)]
)
def test_compiled_and_recomputed_layers_with_an_adapter_merge_them_too(way: bool | str, backend: str) -> None:
    """In one graph without a break, whatever the trees."""
    checkpointing_and_compile.OPTIONS["backend"] = backend
    options: dict[str, Any] = {"adapter": 0.0, "initializer_range": 0.02}
    fast, plain = made("qwen3", True, gradient_checkpointing=way, **options), made("qwen3", False, **options)
    assert relative(loss_gradients(fast, True), loss_gradients(plain, False)) < 1e-6
    stream = Random(0)
    for _ in range(4):
        shapes = [(stream.randint(2, 40), stream.randint(2, 6)) for _ in range(stream.randint(1, 4))]
        some = [Tree([65] * n, [Branch([66] * (at + 2)) for at in range(count)]) for n, count in shapes]
        gradients(fast, True, pack_trees([Tree(t.prompt, [ones(b) for b in t.branches]) for t in some]))
    assert not counters["graph_break"] and counters["stats"]["unique_graphs"] <= 2


def ones(branch: Branch) -> Branch:
    return Branch(branch.ids, {"weight": [1.0] * len(branch.ids)})


@pytest.mark.parametrize(("instructions", "of_mkl"), [("default", "SSE4_2"), ("avx2", "AVX2"), ("avx512", "AVX512")])
def test_every_processor_merges_them(instructions: str, of_mkl: str) -> None:
    """One that rounds in another way is not taken for one whose kernel is wrong."""
    program = "from runner.model.shared_prompt_attention import merge_objection as found; import torch\n"
    program += "print(found(torch.device('cpu')))"
    own = os.environ | {"ATEN_CPU_CAPABILITY": instructions, "MKL_ENABLE_INSTRUCTIONS": of_mkl, "PYTHONPATH": str(ROOT)}
    assert subprocess.check_output([sys.executable, "-c", program], env=own, text=True) == "None\n"


def test_peak_memory_grows_by_the_completions_alone() -> None:
    """Of a step with eight completions of 16 tokens behind 1,024 that they share, over that with one of them."""
    model = causal("qwen2", max_position_embeddings=2048)
    every, peaks = [ones(Branch([at] * 16)) for at in range(8)], list[int]()
    for branches in (every[:1], every):
        data = pack_trees([Tree(list(range(256)) * 4, branches)])
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            gradients(model, True, data)
        sizes = [e.nbytes() for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
        peaks.append(max(accumulate(sizes)))
    assert peaks[0] > 1e6 and peaks[1] / peaks[0] < 1.3


@pytest.mark.parametrize("kind", ["qwen2", "gemma2"])  # chunked head, full logits
def test_a_temperature_divides_the_logits(kind: str) -> None:
    model = causal(kind)
    batch = pack_trees(trees(temperature=True))
    places = (batch.tokens["weight"] > 0).nonzero()[:, 0]
    with torch.no_grad():
        got = model.outputs(_one_for_all(batch, 0.7), NEEDS)
        logits = model._logits(model.shard_tokens(batch))[batch.tokens["parent"][places]] / 0.7
    wanted = torch.distributions.Categorical(logits=logits)
    torch.testing.assert_close(got["entropy"][places], wanted.entropy(), atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(
        got["logprobs"][places], wanted.log_prob(batch.tokens["ids"][places]), atol=5e-5, rtol=5e-5
    )


def _one_for_all(batch: Batch, value: float) -> Batch:
    batch.tokens["temperature"].fill_(value)
    return batch


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_scores_and_values_of_a_scalar_model(layout: str) -> None:
    from transformers.models.qwen2 import Qwen2Config, Qwen2ForSequenceClassification

    from tests.model.zoo import SHAPE

    torch.manual_seed(0)
    module = Qwen2ForSequenceClassification(Qwen2Config(**SHAPE, num_labels=1))
    like = causal("qwen2", batch_layout=layout)
    decisions: list[object] = []
    model = ScalarHeadModel(
        deepcopy(module), like.tokenizer, like.config, seed=0, decide=lambda *words: decisions.append(words)
    )
    assert not decisions and model.layout == layout
    shared = pack_trees(trees(temperature=False))
    alone = pack_trees(trees(temperature=False), share=False)
    with torch.no_grad():
        one, two = (model.outputs(b, frozenset({"scores", "values"})) for b in (shared, alone))
        for row, length in enumerate(alone.rows["lengths"].tolist()):
            start = int(alone.rows["lengths"][:row].sum())
            ids = alone.tokens["ids"][start : start + length]
            hidden = module.model(input_ids=ids[None]).last_hidden_state[0]
            plain = module.score(hidden)[:, 0]
            torch.testing.assert_close(two["scores"][row], plain[-1], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(two["values"][start + 1 : start + length], plain[:-1], atol=1e-5, rtol=1e-5)
            assert float(two["values"][start]) == 0
            assert torch.allclose(module(input_ids=ids[None]).logits[0, 0], plain[-1], atol=1e-5)
    torch.testing.assert_close(one["scores"][shared.rows["branch"] >= 0], two["scores"], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(learnt(shared, one["values"]), learnt(alone, two["values"]), atol=1e-5, rtol=1e-5)
