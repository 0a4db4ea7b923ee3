"""Attention of rows side by side: the NPU's adapter against the definition, and whole models through transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from runner.core.auto_choices import Decisions
from runner.device.config import CpuConfig
from runner.device.cpu import Cpu
from runner.device.npu import DenseFusionAttention
from runner.model import padded_attention
from runner.model.capability_probe import dense_objection
from runner.model.causal_lm import CausalLM
from runner.model.config import TinyConfig
from runner.model.packed_attention import UnsupportedAttention
from runner.model.tiny import byte_tokenizer
from tests.device import operators
from tests.model import zoo

KERNEL = DenseFusionAttention(operators.npu_fusion_attention)
LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def defined(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Query by query in float64; seen [B, S, L]."""
    out = torch.zeros(*query.shape[:3], value.shape[3], dtype=torch.float64)
    for row in range(query.shape[0]):
        for head in range(query.shape[1]):
            kv = head * key.shape[1] // query.shape[1]
            for place in range(query.shape[2]):
                mine = seen[row, place].nonzero()[:, 0]
                if len(mine):
                    weights = torch.softmax(key[row, kv, mine].double() @ query[row, head, place].double() * scale, 0)
                    out[row, head, place] = weights @ value[row, kv, mine].double()
    return out


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, int, int, int, int], Tensor | None, bool]:
    """Rows, heads, key heads, queries, keys; a mask [B, 1, S, L] with a window and padding, or none; causal."""
    rows, (heads, kv) = draw(st.integers(0, 3)), draw(st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]))
    queries, more = draw(st.integers(0, 6)), draw(st.integers(0, 4))
    kind = draw(st.sampled_from(["mask", "causal", "all"]))
    keys = queries + (0 if kind == "causal" else more)
    if kind != "mask":
        return (rows, heads, kv, queries, keys), None, kind == "causal"
    window, pads = draw(st.integers(1, 12)), torch.tensor(draw(st.lists(st.integers(0, 11), min_size=3, max_size=3)))
    behind = (torch.arange(queries)[:, None] + keys - queries) - torch.arange(keys)
    real = torch.arange(keys) >= pads[:rows, None]  # a row may be nothing but padding
    return (rows, heads, kv, queries, keys), ((behind >= 0) & (behind < window) & real[:, None])[:, None], False


@given(cases(), st.sampled_from(list(LIMITS)), st.sampled_from([1.0, 0.3]))
@settings(max_examples=60)
def test_equals_the_definition_in_value_and_gradient(
    case: tuple[tuple[int, int, int, int, int], Tensor | None, bool], dtype: torch.dtype, scale: float
) -> None:
    (rows, heads, kv, queries, keys), mask, causal = case
    torch.manual_seed(rows + queries)
    shapes = [(rows, heads, queries, 8), (rows, kv, keys, 8), (rows, kv, keys, 8)]
    drawn = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    got = KERNEL(*drawn, mask=mask, causal=causal, dropout=0.0, scale=scale)
    wide = [x.detach().double().requires_grad_() for x in drawn]
    seen = torch.ones(rows, queries, keys, dtype=torch.bool)
    wanted = defined(*wide, seen.tril() if causal else seen if mask is None else mask[:, 0], scale)
    assert got.dtype == dtype and got.shape == wanted.shape
    torch.testing.assert_close(got.double(), wanted, rtol=LIMITS[dtype], atol=LIMITS[dtype])
    if not wanted.requires_grad:
        return  # nobody sees anything
    c = torch.randn(wanted.shape, dtype=torch.float64)
    found = torch.autograd.grad((got.double() * c).sum(), drawn, allow_unused=True, materialize_grads=True)
    reference = torch.autograd.grad((wanted * c).sum(), wide, allow_unused=True, materialize_grads=True)
    for one, other in zip(found, reference, strict=True):
        limit = LIMITS[dtype] * (1 + float(other.abs().max() if other.numel() else 0))
        torch.testing.assert_close(one.double(), other, rtol=LIMITS[dtype], atol=limit)


MISTAKES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "scale": lambda o: o.update(scale=1.0),
    "no mask": lambda o: o.update(atten_mask=None, sparse_mode=0),
    "polarity": lambda o: o["sparse_mode"] == 1 and o.update(atten_mask=~o["atten_mask"]),
    "compressed polarity": lambda o: o["sparse_mode"] == 3 and o.update(atten_mask=~o["atten_mask"]),
    "rows without a key": lambda o: o.pop("inner_precise", None),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_each_known_trap_is_seen_by_the_probe(mistake: Callable[[dict[str, Any]], Any]) -> None:
    options = (zoo.module("llama").config, torch.float32, zoo.CPU)
    assert dense_objection(KERNEL, *options) is None

    def failing(*tensors: Tensor, **given: Any) -> Any:
        try:
            mistake(given := {"sparse_mode": 0, **given})
            return operators.npu_fusion_attention(*tensors, **given)
        except AssertionError as error:
            raise RuntimeError(f"aclnnFlashAttentionScore: {error or 'invalid argument'}") from error

    assert dense_objection(DenseFusionAttention(failing), *options) is not None


def through(module: Any, decide: Decisions | None = None) -> Any:
    """The module, attending by the kernel."""
    padded_attention.install_dense_attention(module, KERNEL, decide or Decisions())
    return module


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gpt2"])
def test_a_model_writes_and_scores_the_same_through_the_kernel(family: str) -> None:
    said = Decisions()
    models = [zoo.module(family).double(), through(zoo.module(family).double(), said)]
    assert [str(fact) for fact in said.entries] == [
        "attention.padded: fused (the device's attention kernel for padded batches)"
    ]
    assert models[1].config._attn_implementation == "dense-cpu"
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3], [5], [8, 9, 7, 9, 3]]
    made = []
    for module in models:
        model = CausalLM(module, byte_tokenizer(512), TinyConfig(batch_layout="padded"), seed=0, decide=Decisions())
        assert model.is_padded and model.default_attention == module.config._attn_implementation
        made.append((zoo.greedy(model, prompts, 9, 3), model.outputs(zoo.batch(), zoo.LOGPROBS)["logprobs"]))
    assert made[0][0] == made[1][0], "the same answers, as rows join and leave"
    torch.testing.assert_close(made[0][1], made[1][1])


def test_packed_rows_and_what_is_written_each_have_their_attention() -> None:
    model = CausalLM(through(zoo.module("llama")), byte_tokenizer(512), TinyConfig(), seed=0, decide=Decisions())
    assert (model.layout, model.default_attention, model.inner.config._attn_implementation) == (
        "packed",
        "dense-cpu",
        "ragged",
    )


def test_an_encoder_and_a_classifier_too() -> None:
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.BertConfig(vocab_size=64, num_labels=1, **shape)
    torch.manual_seed(0)
    module = transformers.BertForSequenceClassification(config).eval()
    ids, mask = torch.randint(64, (3, 7)), torch.ones(3, 7, dtype=torch.int64)
    mask[1, 4:] = 0
    wanted = module(input_ids=ids, attention_mask=mask).logits
    through(module, said := Decisions(strict=True))
    assert said.entries and module.config._attn_implementation == "dense-cpu"
    torch.testing.assert_close(module(input_ids=ids, attention_mask=mask).logits, wanted)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_a_model_whose_attention_is_more_keeps_its_own(family: str) -> None:
    module = zoo.module(family)
    own, said = module.config._attn_implementation, Decisions()
    padded_attention.install_dense_attention(module, KERNEL, said)
    [decision] = said.entries
    assert module.config._attn_implementation == own == decision.got and "its attention uses" in decision.reason


def test_an_additive_mask_is_refused() -> None:
    module = through(zoo.module("llama"))
    mask = torch.zeros(1, 1, 4, 4)
    with pytest.raises(UnsupportedAttention, match="its own attention mask"):
        module(input_ids=torch.ones(1, 4, dtype=torch.int64), attention_mask=mask)


def test_a_kernel_that_errs_is_not_used_and_this_is_said() -> None:
    def wrong(*tensors: Tensor, **options: Any) -> Tensor:
        return KERNEL(*tensors, **options) * 1.01

    module, said = zoo.module("llama"), Decisions()
    padded_attention.install_dense_attention(module, wrong, said)
    [decision] = said.entries
    assert (decision.feature, decision.got) == ("attention.padded", "sdpa")
    assert "differs from the definition of attention, for 4 queries on 4 keys" in decision.reason


def test_the_processor_leaves_it_to_transformers() -> None:
    assert Cpu(CpuConfig(), decide=Decisions()).dense_attention() is None
