"""The chunked head against the plain log-softmax, by value, by gradient and by what it allocates."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from runner.model import chunked_lm_head
from runner.model.chunked_lm_head import ALL_IDS, LogitOperands
from runner.model.chunked_logit_loss import chunked_logit_loss


class Largest(TorchDispatchMode):
    """Watches every operation, of backward passes too, for the largest tensor that comes out."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.elements = max(self.elements, leaf.numel())
        return out


class Made(TorchDispatchMode):
    """Counts new tensors of at least so many elements."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self._least, self.count = least, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        large = (x for x in tree_leaves(out) if isinstance(x, Tensor) and x.numel() >= self._least)
        self.count += sum(x.untyped_storage().data_ptr() not in given for x in large)
        return out


def parts(
    tokens: int, bias: bool, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(seed)
    made = nn.Linear(6, 11, bias=bias, dtype=dtype)
    return made, torch.randn(tokens, 6, dtype=dtype, requires_grad=True), torch.randint(0, 11, (tokens,))


def plain(made: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    return torch.log_softmax(made(hidden), -1).gather(1, targets[:, None])[:, 0]


@given(tokens=st.integers(0, 9), chunk=st.integers(1, 10), bias=st.booleans(), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_both_ways_equal_the_plain_computation(tokens: int, chunk: int, bias: bool, seed: int) -> None:
    made, hidden, targets = parts(tokens, bias, seed=seed)
    c = torch.randn(tokens, dtype=torch.float64)
    wanted = plain(made, hidden, targets)
    inputs = [hidden, *made.parameters()]
    wanted_grads = torch.autograd.grad(3 * (wanted * c).sum(), inputs)
    for total, values in (
        ((lambda v: (v * c).sum())(v := chunked_lm_head.chunked_logprobs(made, hidden, targets, chunk)[0]), v),
        chunked_lm_head.chunked_logprob_loss(made, hidden, targets, c, chunk),
    ):
        torch.testing.assert_close(values, wanted)
        torch.testing.assert_close(torch.autograd.grad(3 * total, inputs), wanted_grads)


@pytest.mark.parametrize("tempered", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_gradcheck(bias: bool, tempered: bool) -> None:
    made, hidden, targets = parts(5, bias)
    leaves = (hidden, *made.parameters())

    temperature = torch.tensor([0.5, 1.0, 2.0, 0.7, 1.3], dtype=torch.float64) if tempered else None

    def rebuilt(h: Tensor, w: Tensor, b: Tensor | None = None) -> tuple[Tensor, Tensor]:
        operands = partial(LogitOperands, compute=None, ids=ALL_IDS, temperature=temperature)
        return chunked_lm_head._ChunkedLogprobs.apply(h, w, b, targets, 2, operands, True)

    assert torch.autograd.gradcheck(rebuilt, leaves)
    assert torch.autograd.gradcheck(lambda *t: rebuilt(*t)[1], leaves), "the entropy alone"


@pytest.mark.parametrize("plain_head", [True, False])
def test_a_temperature_divides_the_logits_in_float32(plain_head: bool) -> None:
    """Of a bfloat16 product too, by value and gradient, whether the head is a matrix alone or has a hook."""
    made, hidden, targets = parts(6, True, torch.bfloat16)
    if not plain_head:
        made.register_forward_hook(lambda *_: None)
    temperature = torch.tensor([0.6, 0.7, 1.0, 1.3, 0.9, 2.0])
    logs = (made(hidden).float() / temperature[:, None]).log_softmax(-1)
    wanted = logs.gather(1, targets[:, None])[:, 0]
    [wanted_grad] = torch.autograd.grad(wanted.sum(), hidden)
    got, entropy = chunked_lm_head.chunked_logprobs(made, hidden, targets, 4, None, temperature, entropy=True)
    torch.testing.assert_close(got, wanted, atol=1e-6, rtol=0)
    torch.testing.assert_close(entropy, -(logs.exp() * logs).sum(1), atol=1e-6, rtol=0)
    total, values = chunked_lm_head.chunked_logprob_loss(made, hidden, targets, torch.ones(6), 4, None, temperature)
    torch.testing.assert_close(values, wanted.detach(), atol=1e-6, rtol=0)
    for one in (got.sum(), total):
        torch.testing.assert_close(torch.autograd.grad(one, hidden)[0], wanted_grad, atol=2e-2, rtol=2e-2)


def test_entropy_equals_the_plain_way_also_where_a_probability_is_zero() -> None:
    made, hidden, targets = parts(6, False)
    with torch.no_grad():
        made.weight[3] = -2000 * hidden.sign().mean(0)  # a token that is next to impossible
    _, entropy = chunked_lm_head.chunked_logprobs(made, hidden, targets, 4, entropy=True)
    wanted = torch.distributions.Categorical(logits=made(hidden)).entropy()
    torch.testing.assert_close(entropy, wanted)
    got = torch.autograd.grad(entropy.sum(), hidden)[0]
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got, torch.autograd.grad(wanted.sum(), hidden)[0])


@pytest.mark.parametrize("plain_head", [True, False])
def test_the_entropy_is_computed_only_if_asked(plain_head: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made, hidden, targets = parts(6, False)
    if not plain_head:
        made.register_forward_hook(lambda *_: None)
    calls, compute = list[int](), chunked_lm_head._entropy
    monkeypatch.setattr(chunked_lm_head, "_entropy", lambda values: (calls.append(1), compute(values))[1])
    got, entropy = chunked_lm_head.chunked_logprobs(made, hidden, targets, 4)
    assert entropy is None and not calls
    assert torch.equal(got, chunked_lm_head.chunked_logprobs(made, hidden, targets, 4, entropy=True)[0])
    assert len(calls) == 2, "chunks of 4 of 6 tokens"


def test_frozen_weight_gets_no_gradient_and_hidden_the_same() -> None:
    made, hidden, targets = parts(7, bias=True)
    c = torch.randn(7, dtype=torch.float64)
    wanted = torch.autograd.grad((plain(made, hidden, targets) * c).sum(), hidden)[0]
    made.requires_grad_(False)
    for total in (
        (chunked_lm_head.chunked_logprobs(made, hidden, targets, 3)[0] * c).sum(),
        chunked_lm_head.chunked_logprob_loss(made, hidden, targets, c, 3)[0],
    ):
        torch.testing.assert_close(torch.autograd.grad(total, hidden)[0], wanted)
    assert made.weight.grad is None and made.bias.grad is None


def test_frozen_hidden_trains_the_head_alone() -> None:
    made, hidden, targets = parts(7, bias=False)
    total, _ = chunked_lm_head.chunked_logprob_loss(made, hidden.detach(), targets, torch.ones(7), 3)
    total.backward()
    got = made.weight.grad
    made.weight.grad = None
    plain(made, hidden.detach(), targets).sum().backward()
    torch.testing.assert_close(got, made.weight.grad)


def test_the_linear_total_can_be_differentiated_once_only() -> None:
    made, hidden, targets = parts(4, bias=False)
    total, _ = chunked_lm_head.chunked_logprob_loss(made, hidden, targets, torch.ones(4), 2)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="only once"):
        total.backward()


def test_a_wrapped_head_is_called_and_not_bypassed() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    torch.manual_seed(0)
    made = Doubled(6, 11, dtype=torch.float64)
    _, hidden, targets = parts(7, bias=False)
    assert not chunked_lm_head.is_plain_linear(made)
    wanted = plain(made, hidden, targets)
    got = chunked_lm_head.chunked_logprobs(made, hidden, targets, 3)[0]
    torch.testing.assert_close(got, wanted)
    inputs = [hidden, *made.parameters()]
    torch.testing.assert_close(torch.autograd.grad(got.sum(), inputs), torch.autograd.grad(wanted.sum(), inputs))


def test_a_hooked_head_is_not_plain() -> None:
    made = nn.Linear(2, 3)
    assert chunked_lm_head.is_plain_linear(made)
    made.register_forward_hook(lambda *_: None)
    assert not chunked_lm_head.is_plain_linear(made)


def test_bfloat16_products_keep_a_float32_softmax() -> None:
    torch.manual_seed(0)
    made = nn.Linear(16, 1000, bias=False)
    hidden, targets = torch.randn(8, 16), torch.randint(0, 1000, (8,))
    rounded = made(hidden.double().float()).detach()
    got = chunked_lm_head.chunked_logprobs(made, hidden, targets, 3, torch.bfloat16)[0]
    assert got.dtype == torch.float32
    logits = torch.nn.functional.linear(hidden.bfloat16(), made.weight.bfloat16())
    torch.testing.assert_close(got, torch.log_softmax(logits.double(), -1).gather(1, targets[:, None])[:, 0].float())
    assert (got - torch.log_softmax(rounded, -1).gather(1, targets[:, None])[:, 0]).abs().max() < 0.05


@pytest.mark.parametrize("way", ["logprobs", "linear"])
def test_all_logits_are_never_held(way: str) -> None:
    vocab, tokens, chunk = 4096, 512, 16
    made = nn.Linear(8, vocab, bias=False)
    hidden = torch.randn(tokens, 8, requires_grad=True)
    targets, c = torch.randint(0, vocab, (tokens,)), torch.randn(tokens)
    with Largest() as seen:
        total = (
            chunked_lm_head.chunked_logprob_loss(made, hidden, targets, c, chunk)[0]
            if way == "linear"
            else (chunked_lm_head.chunked_logprobs(made, hidden, targets, chunk)[0] * c).sum()
        )
        total.backward()
    assert chunk * vocab <= seen.elements <= 2 * chunk * vocab < tokens * vocab / 8


@pytest.mark.parametrize("way", ["logprobs", "linear", "terms"])
@pytest.mark.parametrize("compute", [None, torch.bfloat16])
def test_no_chunk_makes_a_tensor_as_large_as_the_weight(
    way: str, compute: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is one: its gradient; with products in bfloat16, the weight in bfloat16 as well, for all chunks."""
    monkeypatch.setattr(chunked_lm_head, "WEIGHT_ROWS", 100)
    made = nn.Linear(64, 512, bias=False)
    hidden, targets = torch.randn(80, 64, requires_grad=True), torch.randint(0, 512, (80,))
    c, options = torch.randn(80), (8, compute)
    with Made(made.weight.numel()) as seen:
        if way == "linear":
            total = chunked_lm_head.chunked_logprob_loss(made, hidden, targets, c, *options)[0]
        elif way == "terms":
            total = chunked_logit_loss(made, hidden, c, _picked, {"targets": targets}, *options)[0]
        else:
            total = (chunked_lm_head.chunked_logprobs(made, hidden, targets, *options)[0] * c).sum()
        total.backward()
    again = way == "logprobs" and compute is not None  # which makes the logits again, from the weight as it is stored
    assert seen.count == 1 + (compute is not None) + again
    wanted = torch.autograd.grad((plain(made, hidden, targets) * c).sum(), made.weight)[0]
    limit = 2e-5 if compute is None else 0.05
    torch.testing.assert_close(made.weight.grad, wanted, atol=limit, rtol=limit)


def _picked(logits: Tensor, tokens: Any) -> dict[str, Tensor]:
    return {"loss": logits.float().log_softmax(-1).gather(1, tokens["targets"][:, None])[:, 0]}
