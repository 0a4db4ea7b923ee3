"""Kernels for sequences end to end: each adapter, over its operator as documented, against attention's definition."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from runner.core import torch_compat
from runner.core.auto_choices import Decisions
from runner.core.errors import EnvironmentProblem
from runner.core.prefix_tree import pack_trees
from runner.device.config import CudaConfig
from runner.device.cuda import FlashAttention, TorchFlashAttention, varlen_kernel
from runner.device.npu import MOST_SEQUENCES, FusionAttention
from runner.interfaces import SequenceLengths, VarlenAttention
from runner.model import shared_prompt_attention
from runner.model.capability_probe import kernel_objection
from runner.model.packed_attention import plan_attention
from runner.model.shared_prompt_attention import FLASH_KERNELS, merge_objection
from tests.device import operators
from tests.device.cases import trees
from tests.model import zoo

KERNELS: dict[str, VarlenAttention] = {
    "npu": FusionAttention(operators.npu_fusion_attention),
    "flash-attn": FlashAttention(operators.flash_attn_varlen_func, deterministic=True),
    "torch": TorchFlashAttention(operators.varlen_attn),
}
LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def ends(queries: tuple[int, ...], keys: tuple[int, ...] | None = None) -> dict[str, SequenceLengths]:
    """The keywords of a kernel; keys: None = as many."""
    return {"queries": SequenceLengths.of(queries, zoo.CPU), "keys": SequenceLengths.of(keys or queries, zoo.CPU)}


def defined(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[tuple[int, int]], window: int | None, scale: float
) -> Tensor:
    """One token after the other: softmax over the keys up to its own, in float64."""
    out, q_at, k_at = [], 0, 0
    for queries, keys in lengths:
        for place in range(queries):
            own = k_at + keys - queries + place
            first = k_at if window is None else max(k_at, own - window + 1)
            for head in range(query.shape[1]):
                kv = head * key.shape[1] // query.shape[1]
                ks, vs = key[first : own + 1, kv].double(), value[first : own + 1, kv].double()
                weights = torch.softmax(ks @ query[q_at + place, head].double() * scale, 0)
                out.append(weights @ vs)
        q_at, k_at = q_at + queries, k_at + keys
    return torch.stack(out).view(-1, *query.shape[1:])


lengths_strategy = st.lists(
    st.tuples(st.integers(0, 7), st.integers(0, 5)).map(lambda pair: (pair[0], pair[0] + pair[1])),
    min_size=1,
    max_size=5,
).filter(lambda pairs: any(queries for queries, _ in pairs))


@pytest.mark.parametrize("name", KERNELS)
@given(
    lengths=lengths_strategy,
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]),
    window=st.none() | st.integers(1, 9),
    dtype=st.sampled_from(list(LIMITS)),
    scale=st.sampled_from([1.0, 0.3, 8**-0.5]),
)
@settings(max_examples=25)
def test_equals_the_definition_in_value_and_gradient(
    name: str,
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
    window: int | None,
    dtype: torch.dtype,
    scale: float,
) -> None:
    torch.manual_seed(len(lengths))
    queries, keys = (tuple(sizes) for sizes in zip(*lengths, strict=True))
    shapes = [(sum(queries), heads[0], 8), *[(sum(keys), heads[1], 8)] * 2]
    given = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    got = KERNELS[name](*given, **ends(queries, keys), window=window, dropout=0.0, scale=scale)
    wide = [x.detach().double().requires_grad_() for x in given]
    wanted = defined(*wide, lengths, window, scale)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), wanted, rtol=LIMITS[dtype], atol=LIMITS[dtype])
    c = torch.randn(wanted.shape, dtype=torch.float64)
    gradients = torch.autograd.grad((got.double() * c).sum(), given)
    for gradient, reference in zip(gradients, torch.autograd.grad((wanted * c).sum(), wide), strict=True):
        limit = LIMITS[dtype] * (1 + float(reference.abs().max()))
        torch.testing.assert_close(gradient.double(), reference, rtol=LIMITS[dtype], atol=limit)


def spoilt(change: Callable[[dict[str, Any]], None]) -> VarlenAttention:
    """The NPU adapter over an operator that gets its arguments changed: the mistakes that the facts warn of."""

    def operator(*tensors: Tensor, **options: Any) -> Any:
        change(options)
        return operators.npu_fusion_attention(*tensors, **options)

    return FusionAttention(operator)


@pytest.mark.parametrize(
    "mistake",
    [
        lambda o: o.update(scale=1.0),  # the operator's default
        lambda o: o.update(atten_mask=None),  # then everything is seen, whatever the mode
        lambda o: o.update(atten_mask=~o["atten_mask"]),  # True as "seen", which is torch's sense of it
        lambda o: o.update(sparse_mode=3) or o.pop("pre_tockens", None),  # a window that is forgotten
        lambda o: "pre_tockens" in o and o.update(pre_tockens=o["pre_tockens"] + 1),  # counted with the query's own key
        lambda o: "next_tockens" in o and o.pop("next_tockens"),  # a window without an end
        lambda o: o.update(actual_seq_qlen=[0, *o["actual_seq_qlen"]]),  # flash-attention's leading 0
        lambda o: o.update(actual_seq_kvlen=o["actual_seq_qlen"]),
    ],
    ids=["scale", "no mask", "polarity", "no window", "wide window", "no end", "leading zero", "key lengths"],
)
def test_each_known_trap_is_seen_by_the_probe(mistake: Callable[[dict[str, Any]], None]) -> None:
    config = zoo.module("llama").config
    options = (config, torch.float32, zoo.CPU)
    assert kernel_objection(KERNELS["npu"], *options) is None

    def failing(*tensors: Tensor, **given: Any) -> Any:
        try:
            mistake(given)
            return operators.npu_fusion_attention(*tensors, **given)
        except AssertionError as error:
            raise RuntimeError(f"aclnnFlashAttentionScore: {error or 'invalid argument'}") from error

    assert kernel_objection(FusionAttention(failing), *options) is not None


def test_the_scale_is_always_given_and_the_mask_is_the_compressed_one() -> None:
    seen: list[dict[str, Any]] = []
    subject = spoilt(lambda options: seen.append(dict(options)))
    x = torch.randn(5, 2, 4)
    for window in (None, 9, 2):
        subject(x, x, x, **ends((5,)), window=window, dropout=0.25, scale=0.5)
    assert [options["sparse_mode"] for options in seen] == [3, 3, 4], "a window as long as the rows is none"
    assert all(options["scale"] == 0.5 and options["keep_prob"] == 0.75 for options in seen)
    assert (seen[2]["pre_tockens"], seen[2]["next_tockens"]) == (1, 0)
    mask = seen[0]["atten_mask"]
    assert mask.shape == (2048, 2048) and mask.dtype == torch.bool
    assert bool(mask[0, 1]) and not bool(mask.diagonal().any()) and not bool(mask[1, 0]), "True is masked"


def test_long_lists_of_sequences_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    subject = spoilt(lambda options: sizes.append(len(options["actual_seq_qlen"])))
    count = 2 * MOST_SEQUENCES + 7
    x = torch.randn(count, 1, 2)
    ones = (1,) * count
    out = subject(x, x, x, **ends(ones), window=None, dropout=0.0, scale=1.0)
    assert sizes == [MOST_SEQUENCES, MOST_SEQUENCES, 7]
    torch.testing.assert_close(out, x)  # each token sees itself alone


def test_more_queries_than_keys_are_refused() -> None:
    x = torch.randn(3, 1, 2)
    with pytest.raises(ValueError, match="more queries than keys"):
        KERNELS["npu"](x, x[:2], x[:2], **ends((3,), (2,)), window=None, dropout=0.0, scale=1.0)


def test_dropout_without_a_kernel_for_it_says_what_to_type() -> None:
    x = torch.randn(3, 1, 2)
    with pytest.raises(EnvironmentProblem, match=r"device\.attention=sdpa"):
        KERNELS["torch"](x, x, x, **ends((3,)), window=None, dropout=0.1, scale=1.0)


def test_lengths_are_what_flash_kernels_take() -> None:
    found = SequenceLengths.of([2, 3], zoo.CPU)
    assert (found.lengths, found.longest) == ((2, 3), 3)
    assert found.cumulative.tolist() == [0, 2, 5] and found.cumulative.dtype == torch.int32


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize("name", KERNELS)
def test_a_model_scores_and_learns_the_same_through_a_kernel(name: str, family: str, share: bool) -> None:
    data = pack_trees(trees(), share=share)
    plain, through = zoo.causal(family, double=True), zoo.causal(family, double=True)
    through.set_varlen_kernel(KERNELS[name], decide=(decisions := Decisions()))
    assert decisions.entries == [] and through.layout == "packed"
    got, wanted = (model.outputs(data, zoo.LOGPROBS)["logprobs"] for model in (through, plain))
    torch.testing.assert_close(got, wanted)
    assert zoo.relative(*(zoo.gradients(model, True, data) for model in (through, plain))) < 1e-9


def test_shared_prompts_repeat_keys_and_no_query() -> None:
    data = pack_trees(trees())
    rows = plan_attention(data, KERNELS["npu"])
    assert rows.queries is not None and rows.keys is not None and sum(rows.queries.lengths) == data.num_tokens
    assert rows.key_index is not None and sum(rows.keys.lengths) == len(rows.key_index) > data.num_tokens
    alone = plan_attention(pack_trees(trees(), share=False), KERNELS["npu"])
    assert alone.key_index is None and alone.keys == alone.queries


@pytest.fixture
def flash() -> Iterator[None]:
    """The way of an NVIDIA GPU to merge shared prompts, over its operators as they are documented."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", operators.flash_attention_forward, "CPU")
    library.impl("_flash_attention_backward", operators.flash_attention_backward, "CPU")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_prompt_attention, "ROW_KERNELS", FLASH_KERNELS)
        merge_objection.cache_clear()
        yield
    merge_objection.cache_clear()
    library._destroy()


@pytest.mark.usefixtures("flash")
def test_an_nvidia_gpu_merges_shared_prompts_by_its_flash_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert merge_objection(zoo.CPU) is None
    model, data = zoo.causal("qwen3", initializer_range=0.05), pack_trees(trees())
    got = zoo.gradients(model, True, data)
    forward, backward = FLASH_KERNELS
    wrong = lambda *given: forward(*given[:3], True, given[4])  # noqa: E731  a prompt seen through a causal mask
    monkeypatch.setattr(shared_prompt_attention, "ROW_KERNELS", (wrong, backward))
    merge_objection.cache_clear()
    assert merge_objection(zoo.CPU) == "its kernel differs from the definition of attention"
    assert plan_attention(data).prompts is None
    assert zoo.relative(got, zoo.gradients(model, True, data)) < 1e-6


def test_a_kernel_that_errs_is_not_used_and_this_is_said() -> None:
    model = zoo.causal("llama")
    model.set_varlen_kernel(spoilt(lambda options: options.update(scale=1.0)), decide=(decisions := Decisions()))
    [decision] = decisions.entries
    assert (decision.feature, decision.got) == ("attention", "sdpa") and model._kernel is None
    assert "differs from the definition of attention" in decision.reason
    with pytest.raises(EnvironmentProblem, match="strict"):
        model.set_varlen_kernel(spoilt(lambda options: options.update(scale=1.0)), decide=Decisions(strict=True))


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of a package flash_attn that is found before any other."""
    (tmp_path / "flash_attn").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / "flash_attn" / "__init__.py"
    sys.modules.pop("flash_attn", None)


def chosen(dtype: torch.dtype = torch.bfloat16, **options: Any) -> tuple[VarlenAttention | None, Decisions]:
    decisions = Decisions()
    return varlen_kernel(CudaConfig(**options), dtype, decisions), decisions


def test_a_gpu_takes_flash_attn_if_it_is_installed(package: Path) -> None:
    text = "__version__ = '2.9.9'\ndef flash_attn_varlen_func(*a, **k):\n    return k['deterministic']\n"
    package.write_text(text)
    for deterministic in (True, False):
        found, decisions = chosen(deterministic=deterministic)
        assert isinstance(found, FlashAttention) and str(decisions.entries[0]) == "attention: fused (flash-attn 2.9.9)"
        x: Any = torch.zeros(1, 1, 2)
        options: Any = {**ends((1,)), "window": None, "dropout": 0.0, "scale": 1.0}
        assert found(x, x, x, **options) is deterministic


def test_a_flash_attn_that_does_not_load_is_said(package: Path) -> None:
    package.write_text("raise ImportError('libcudart.so.11: cannot open shared object file')")
    found, decisions = chosen()
    assert found is None and "libcudart.so.11" in str(decisions.entries[0])


def test_a_kernel_without_grouped_queries_is_given_keys_and_values_for_each_query(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def of_torch_2_11(query: Tensor, key: Tensor, value: Tensor, scale: float, window_size: tuple[int, int]) -> Tensor:
        assert query.shape == key.shape == value.shape
        return scaled_dot_product_attention(*(one.transpose(0, 1) for one in (query, key, value)), scale=scale)

    torch.manual_seed(0)
    query, key, value = torch.randn(5, 6, 4), torch.randn(5, 2, 4), torch.randn(5, 2, 4)
    module = ModuleType("torch.nn.attention.varlen")
    module.__spec__, module.varlen_attn = ModuleSpec(module.__name__, None), of_torch_2_11
    monkeypatch.setitem(sys.modules, module.__name__, module)
    found = torch_compat.varlen_attention()(query, key, value, scale=0.3, window_size=(-1, 0), enable_gqa=True)
    heads = (one.transpose(0, 1) for one in (query, key, value))
    torch.testing.assert_close(found, scaled_dot_product_attention(*heads, scale=0.3, enable_gqa=True))


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="flash-attn is installed")
def test_else_it_takes_torchs_own_kernel_or_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    found, decisions = chosen()
    if torch_compat.varlen_attention() is None:  # torch 2.10 and older
        assert found is None and f"torch {torch.__version__} has no such kernel" in decisions.entries[0].reason
        return
    assert isinstance(found, TorchFlashAttention) and decisions.entries[0].is_fact
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    monkeypatch.setattr(varlen, "varlen_attn", lambda query, key, value: None)  # that of an older torch
    found, decisions = chosen()
    assert found is None and "flash-attn is not installed" in decisions.entries[0].reason
    found, decisions = chosen(torch.float32)
    assert found is None and "bfloat16, not float32" in decisions.entries[0].reason
    assert chosen(torch.float32, attention="sdpa") == (None, Decisions())
