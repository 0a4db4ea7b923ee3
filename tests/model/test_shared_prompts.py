"""A prompt that is computed once gives what repeating it gives: outputs and gradients, in every layout."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor

from runner.core.batch import Batch
from runner.core.prefix_tree import Branch, Tree, pack_trees
from runner.model.value_head import ScalarHeadModel
from tests.model.test_causal_lm import causal
from tests.model.zoo import VOCAB

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
