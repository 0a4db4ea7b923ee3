"""Terms of the logits in chunks against those of all logits: value, gradient, and what is ever held at once."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from runner.model import chunked_logit_loss
from tests.model.test_chunked_lm_head import Largest


def entropic(logits: Tensor, tokens: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A loss that is in no way linear in log-probabilities, and something that is measured beside it."""
    p = torch.softmax(logits, -1)
    return {"loss": (p**2).sum(-1) * tokens["scale"] + p[:, 0].log(), "top": p.max(-1).values}


def parts(tokens: int, bias: bool, seed: int = 0) -> tuple[nn.Linear, Tensor, dict[str, Tensor], Tensor]:
    torch.manual_seed(seed)
    head = nn.Linear(6, 11, bias=bias, dtype=torch.float64)
    hidden = torch.randn(tokens, 6, dtype=torch.float64, requires_grad=True)
    return head, hidden, {"scale": torch.randn(tokens).double()}, torch.randn(tokens, dtype=torch.float64)


class Shifted(nn.Module):
    """A head that is more than a matrix."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.inner(hidden)) * 3


@given(tokens=st.integers(0, 9), chunk=st.integers(1, 10), bias=st.booleans(), plain=st.booleans())
@settings(max_examples=30, deadline=None)
def test_chunks_give_what_all_logits_give(tokens: int, chunk: int, bias: bool, plain: bool) -> None:
    inner, hidden, channels, c = parts(tokens, bias)
    head = inner if plain else Shifted(inner)
    inputs = [hidden, *inner.parameters()]
    wanted = entropic(head(hidden), channels)
    total, found = chunked_logit_loss.chunked_logit_loss(head, hidden, c, entropic, channels, chunk)
    torch.testing.assert_close(total, (wanted["loss"] * c).sum())
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name].detach())
        assert not found[name].requires_grad
    wanted_grads = torch.autograd.grad(3 * (wanted["loss"] * c).sum(), inputs)
    torch.testing.assert_close(torch.autograd.grad(3 * total, inputs), wanted_grads)


@pytest.mark.parametrize("plain", [True, False])
def test_never_more_than_a_chunk_of_logits(plain: bool) -> None:
    torch.manual_seed(0)
    inner = nn.Linear(4, 1000, bias=False)
    hidden, scale = torch.randn(64, 4, requires_grad=True), torch.ones(64)
    with Largest() as watched:
        head = inner if plain else Shifted(inner)
        total, _ = chunked_logit_loss.chunked_logit_loss(head, hidden, scale, entropic, {"scale": scale}, chunk=4)
        total.backward()
    assert watched.elements == 4 * 1000, "the head's weight is as large"


def test_it_can_be_differentiated_once_and_needs_no_gradient() -> None:
    head, hidden, channels, c = parts(5, True)
    total, _ = chunked_logit_loss.chunked_logit_loss(head, hidden, c, entropic, channels, 2)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="only once"):
        total.backward()
    with torch.no_grad():
        again, _ = chunked_logit_loss.chunked_logit_loss(head, hidden, c, entropic, channels, 2)
    torch.testing.assert_close(again, total.detach())


def test_sums_of_bfloat16_logits_are_kept_in_float32() -> None:
    torch.manual_seed(0)
    head, hidden = nn.Linear(6, 11).bfloat16(), torch.randn(5, 6).bfloat16()
    total, found = chunked_logit_loss.chunked_logit_loss(
        head, hidden, torch.ones(5), entropic, {"scale": torch.ones(5)}, 2
    )
    assert total.dtype == torch.float32 and found["loss"].shape == (5,)
    total.backward()
    assert head.weight.grad is not None and head.weight.grad.dtype == torch.bfloat16
