"""bfloat16 on a device against exact numbers, forward and backward: attention kernels, and whole models."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from runner.core.auto_choices import Decisions
from runner.core.prefix_tree import pack_trees
from runner.device.config import CudaConfig
from runner.device.cuda import varlen_kernel
from runner.interfaces import Device, SequenceLengths
from runner.model.causal_lm import CausalLM
from runner.model.config import TinyConfig
from runner.model.ring_attention import _matmul_float32
from runner.model.tiny import byte_tokenizer
from runner.spec.base import Dtype
from tests.device.cases import trees
from tests.model import zoo

LIMIT = 2e-2  # bfloat16 keeps 8 bits
MODEL_LIMIT = 0.05  # of log-probabilities near -6, and of the largest gradient; a window off by one token makes 0.3
LENGTHS = ((300, 300), (1, 1), (128, 640), (77, 500))  # queries, and keys, of which the queries are the last
NEAR_REAL = {"head_dim": 64, "hidden_size": 128, "initializer_range": 0.05}


def attention(query: Tensor, key: Tensor, value: Tensor, window: int | None, scale: float) -> Tensor:
    """By its definition: query [Q, heads, d], key and value [K, kv heads, d] of all sequences of LENGTHS."""
    out = []
    parts = query.split([q for q, _ in LENGTHS]), *(x.split([k for _, k in LENGTHS]) for x in (key, value))
    for q, k, v in zip(*parts, strict=True):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        own, other = torch.arange(len(k) - len(q), len(k))[:, None], torch.arange(len(k))
        seen = (other <= own) & (other > own - (window or len(k)))
        scores = torch.einsum("qhd,khd->hqk", q, k).mul(scale).masked_fill(~seen.to(q.device), -torch.inf)
        out.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
    return torch.cat(out)


@pytest.mark.cuda
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("heads", [(8, 8), (16, 4)])
def test_the_flash_kernel_of_a_job_is_attention(heads: tuple[int, int], window: int | None) -> None:
    decisions = Decisions()
    found = varlen_kernel(CudaConfig(), torch.bfloat16, decisions)
    assert found is not None, decisions.entries
    sizes = [list(one) for one in zip(*LENGTHS, strict=True)]
    queries, keys = (SequenceLengths.of(one, torch.device("cuda")) for one in sizes)
    torch.manual_seed(0)
    shapes = [(sum(sizes[0]), heads[0], 128), *[(sum(sizes[1]), heads[1], 128)] * 2]
    given = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    got = found(*given, queries=queries, keys=keys, window=window, dropout=0.0, scale=128**-0.5)
    wide = [x.detach().double().requires_grad_() for x in given]
    wanted = attention(*wide, window, 128**-0.5)
    torch.testing.assert_close(got.double(), wanted, rtol=LIMIT, atol=LIMIT)
    c = torch.randn_like(wanted)
    gradients = torch.autograd.grad((got.double() * c).sum(), given)
    for gradient, exact in zip(gradients, torch.autograd.grad((wanted * c).sum(), wide), strict=True):
        limit = LIMIT * (1 + float(exact.abs().max()))
        torch.testing.assert_close(gradient.double(), exact, rtol=LIMIT, atol=limit)


def causal(family: str, device: torch.device, dtype: Dtype, decisions: Decisions) -> CausalLM:
    """A small model of this family on a device."""
    module = zoo.module(family, **NEAR_REAL).to(device).requires_grad_(True)
    config = TinyConfig(dtype=dtype, lm_head_chunk_tokens=16)
    return CausalLM(module, byte_tokenizer(512), config, seed=0, decide=decisions)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "mistral"])
def test_a_model_in_bfloat16_is_near_the_one_in_float32(family: str, device: Device) -> None:
    decisions, batch = Decisions(), pack_trees(trees())
    model, exact = (
        causal(family, device.torch_device, "bfloat16", decisions),
        causal(family, zoo.CPU, "float32", decisions),
    )
    if found := device.varlen_attention(torch.bfloat16):
        model.set_varlen_kernel(found, decide=decisions)
    assert all(one.is_fact for one in decisions.entries), decisions.entries
    there = batch.to(device.torch_device)
    got, wanted = (
        one.outputs(data, zoo.LOGPROBS)["logprobs"].detach() for one, data in ((model, there), (exact, batch))
    )
    assert float((got.cpu() - wanted).abs().max()) < MODEL_LIMIT
    coefficients = -batch.tokens["weight"] / batch.count()["tokens"]
    gradients = []
    for one, data in ((model, there), (exact, batch)):
        one.linear_loss(data, coefficients)[0].backward()  # type: ignore[no-untyped-call]
        gradients.append({name: p.grad.cpu() for name, p in one.trainable().items() if p.grad is not None})
    assert zoo.relative(*gradients) < MODEL_LIMIT


@pytest.mark.cuda
def test_products_of_ring_attention_are_summed_in_float32() -> None:
    torch.manual_seed(0)
    a, b = (torch.randn(2, 256, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    got = _matmul_float32(a, b)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), a.double() @ b.double(), rtol=1e-4, atol=1e-3)
