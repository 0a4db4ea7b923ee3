"""Attention by ranks that have some tokens each against its definition, in value and gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from runner.core.batch import Batch
from runner.core.errors import SpecError
from runner.core.prefix_tree import Branch, Tree, pack_trees
from runner.model import ring_attention
from runner.model.context_parallel import ContextParallelGroup, CpShard
from tests.model.test_sight import mask
from tests.parallelism.forked import ranks

HEADS, SIZE, VALUES = 6, 4, 3  # heads of values may be of another size than those of keys
CASES = 6


def drawn(seed: int) -> tuple[Batch, int | None, int]:
    """A batch, a window, and a number of key-value heads."""
    generator = torch.Generator().manual_seed(seed)

    def number(least: int, most: int) -> int:
        return int(torch.randint(least, most + 1, (), generator=generator))

    trees = [
        Tree([1] * number(1, 20), [Branch([2] * number(1, 25)) for _ in range(number(1, 3))])
        for _ in range(number(1, 4))
    ]
    batch = pack_trees(trees, share=seed % 3 > 0)
    return batch, number(1, 30) if seed % 2 else None, (1, 2, 3, 6)[seed % 4]


def tensors(batch: Batch, kv_heads: int, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(batch.num_tokens)
    shapes = ((HEADS, SIZE), (kv_heads, SIZE), (kv_heads, VALUES), (HEADS, VALUES))
    return [torch.randn(1, heads, batch.num_tokens, size, dtype=torch.float64).to(dtype) for heads, size in shapes]


def defined(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    """[1, heads, T, e]."""
    k, v = (x.repeat_interleave(HEADS // k.shape[1], 1) for x in (k, v))
    return (q @ k.mT * scale).masked_fill(~seen, -torch.inf).softmax(-1) @ v


def wanted(batch: Batch, window: int | None, kv_heads: int, dtype: torch.dtype, scale: float) -> list[Tensor]:
    """What attention gives, and the gradients of queries, keys and values; all computed in float64."""
    *inputs, grad = (t.double() for t in tensors(batch, kv_heads, dtype))
    for tensor in inputs:
        tensor.requires_grad_()
    q, k, v = inputs
    out = defined(q, k, v, mask(batch, window), scale)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def on_rank(rank: int, size: int, style: Any, dtype: torch.dtype, scale: float | None) -> list[list[Tensor]]:
    """Of each case the same, with 0 where it is other ranks' tokens."""
    ring_attention.QUERIES, ring_attention.KEYS = 5, 7  # so that there are many tiles
    found = []
    for case in range(CASES):
        batch, window, kv_heads = drawn(case)
        share: Any = CpShard(batch, ContextParallelGroup(distributed.group.WORLD, rank, size, style))
        held, real = share._held[rank], share._real[rank]
        *inputs, grad = (t.index_select(2, held) for t in tensors(batch, kv_heads, dtype))
        inputs = [tensor.detach().requires_grad_() for tensor in inputs]
        out = share._attention(None).attend(*inputs, window, 0.0, scale)
        grad = grad * real[:, None]  # nothing is read of stand-ins
        made = [out.detach().transpose(1, 2), *torch.autograd.grad(out.transpose(1, 2), inputs, grad)]
        assert all(tensor.dtype == dtype for tensor in made)
        assert all(not grad[:, :, ~real].any() for grad in made[1:])
        zeros = [tensor.new_zeros(*tensor.shape[:2], batch.num_tokens, tensor.shape[3]) for tensor in made]
        found.append([z.index_copy(2, held[real], m[:, :, real]) for z, m in zip(zeros, made, strict=True)])
    return found


def compare(size: int, style: str, dtype: torch.dtype = torch.float64, scale: float | None = None) -> None:
    bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    shares = ranks(size, on_rank, size, style, dtype, scale)
    for case in range(CASES):
        batch, window, kv_heads = drawn(case)
        right = wanted(batch, window, kv_heads, dtype, SIZE**-0.5 if scale is None else scale)
        for at, one in enumerate(right):
            got = sum((share[case][at].double() for share in shares), torch.zeros(()))
            assert float((got - one).abs().max()) <= bound * float(one.abs().max()), (case, at)


@pytest.mark.parametrize(("size", "style"), [(2, "ulysses"), (3, "ulysses"), (2, "ring"), (4, "ring")])
def test_it_is_attention(size: int, style: str) -> None:
    compare(size, style)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("style", ["ulysses", "ring"])
def test_in_other_data_types(dtype: torch.dtype, style: str) -> None:
    compare(3, style, dtype)


def test_a_scale_of_its_own() -> None:
    compare(3, "ring", scale=0.3)


def test_ring_drops_no_weights() -> None:
    def work(rank: int) -> str:
        batch, _, kv_heads = drawn(0)
        share: Any = CpShard(batch, ContextParallelGroup(distributed.group.WORLD, rank, 2, "ring"))
        *inputs, _ = (t.index_select(2, share._held[rank]) for t in tensors(batch, kv_heads, torch.float32))
        with pytest.raises(SpecError) as error:
            share._attention(None).attend(*inputs, None, 0.1, None)
        return str(error.value.problems[0].message)

    assert all("has no attention dropout, but the model has 0.1" in said for said in ranks(2, work))


def written() -> int:
    """Bytes that this process has handed to write(), sockets included."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["wchar"])


def sent(rank: int, size: int, style: Any, window: int | None) -> tuple[int, int]:
    """Bytes that a rank sends forward and backward for one row of 1,024 tokens, 4 heads and 2 of keys and values."""
    share: Any = CpShard(
        pack_trees([Tree([1] * 512, [Branch([2] * 512)])]),
        ContextParallelGroup(distributed.group.WORLD, rank, size, style),
    )
    shape = (1, 4, len(share._held[rank]), 32)
    query, key, value = (torch.ones(1, heads, *shape[2:], requires_grad=True) for heads in (4, 2, 2))
    attention, counts = share._attention(None), []
    for _ in range(2):  # the first time connections are made, and what is seen is found out
        distributed.barrier()
        counts.append(written())
        out = attention.attend(query, key, value, window, 0.0, None)
        distributed.barrier()
        counts.append(written())
        out.sum().backward()
        distributed.barrier()
        counts.append(written())
    return counts[4] - counts[3], counts[5] - counts[4]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_bytes_sent(size: int) -> None:
    """Ulysses: 1/C of each tensor to each rank. Ring: each rank's early run to all, its late one to those before it."""
    tokens, others = 1024 // size, size - 1
    ulysses = others / size * tokens * (4 + 2 * max(2, size) + 4) * 32 * 4  # q, k, v there, and back
    for forward, backward in ranks(size, sent, size, "ulysses", None):
        assert forward == pytest.approx(ulysses, rel=0.02) and backward == pytest.approx(ulysses, rel=0.02)
    needed = 3 / 4 * size * others * tokens * (2 + 2) * 32 * 4  # by all ranks
    found = ranks(size, sent, size, "ring", None)
    assert sum(forward for forward, _ in found) == pytest.approx(needed, rel=0.02)
    assert sum(backward for _, backward in found) == pytest.approx(2 * needed, rel=0.02)
    found = ranks(size, sent, size, "ring", 64)
    assert sum(forward for forward, _ in found) < 0.2 * needed
