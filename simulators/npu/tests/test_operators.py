"""The simulated NPU's fused operators against their definitions in float64 and torch's own gradients; no torch_npu."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given as drawn_from
from hypothesis import strategies as st
from torch import Tensor

from npu_simulator import attention, operators
from npu_simulator.draw import stream
from npu_simulator.strict import Refused

INFINITE = 2147483647
COMPRESSED = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
DEFAULTS: dict[str, Any] = {
    "pse": None,
    "padding_mask": None,
    "atten_mask": None,
    "scale": 1.0,
    "keep_prob": 1.0,
    "pre_tockens": INFINITE,
    "next_tockens": INFINITE,
    "inner_precise": 0,
    "prefix": None,
    "actual_seq_qlen": None,
    "actual_seq_kvlen": None,
    "sparse_mode": 0,
    "sink": None,
    "dropout_mask": None,
}


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def call(query: Tensor, key: Tensor, value: Tensor, layout: str, heads: int, **more: Any) -> dict[str, Any]:
    tensors = {"query": query, "key": key, "value": value}
    return DEFAULTS | tensors | {"input_layout": layout, "head_num": heads} | more


def by_definition(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor, scale: float) -> Tensor:
    """[B, N, S, d] in float64, element by element; a row that sees nothing is 0."""
    repeats = query.shape[1] // key.shape[1]
    q, k, v = query.double(), key.double().repeat_interleave(repeats, 1), value.double().repeat_interleave(repeats, 1)
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
    for s in range(q.shape[2]):
        seen = [j for j in range(k.shape[2]) if not hidden[s, j]]
        if seen:
            weights = (scale * torch.einsum("bnd,bnld->bnl", q[:, :, s], k[:, :, seen])).exp()
            out[:, :, s] = torch.einsum("bnl,bnld->bnd", weights / weights.sum(-1, keepdim=True), v[:, :, seen])
    return out


def band(queries: int, keys: int, before: int, after: int, last: bool) -> Tensor:
    """True = hidden, counted from the first of both, or from the last."""
    shift = keys - queries if last else 0
    rows = [[not -before <= j - (i + shift) <= after for j in range(keys)] for i in range(queries)]
    return torch.tensor(rows)


CASES = {
    "full": ({}, lambda s, k: torch.zeros(s, k, dtype=torch.bool)),
    "mode 1, given in full": ({"sparse_mode": 1, "atten_mask": "own"}, lambda s, k: band(s, k, 2, 1, False)),
    "mode 0, mask and band": (
        {"sparse_mode": 0, "atten_mask": "own", "pre_tockens": 1, "next_tockens": 0},
        lambda s, k: band(s, k, 1, 0, False),
    ),
    "mode 2, from the first": ({"sparse_mode": 2, "atten_mask": COMPRESSED}, lambda s, k: band(s, k, 99, 0, False)),
    "mode 3, from the last": ({"sparse_mode": 3, "atten_mask": COMPRESSED}, lambda s, k: band(s, k, 99, 0, True)),
    "mode 4, a window": (
        {"sparse_mode": 4, "atten_mask": COMPRESSED, "pre_tockens": 2, "next_tockens": 0},
        lambda s, k: band(s, k, 2, 0, True),
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("heads", "groups", "queries", "keys"), [(2, 2, 5, 5), (4, 2, 4, 6), (4, 1, 1, 3)])
def test_attention_is_its_definition_in_every_mode(name: str, heads: int, groups: int, queries: int, keys: int) -> None:
    options, hides = CASES[name]
    hidden = hides(queries, keys)
    if options.get("atten_mask") == "own":
        options = options | {"atten_mask": band(queries, keys, 2, 1, False)}
    q, k, v = numbers(2, heads, queries, 8), numbers(2, groups, keys, 8, seed=1), numbers(2, groups, keys, 8, seed=2)
    got = attention.forward(call(q, k, v, "BNSD", heads, scale=0.3, **options), 0, 0)
    torch.testing.assert_close(got[0].double(), by_definition(q, k, v, hidden, 0.3), atol=1e-6, rtol=1e-5)


LAYOUTS = {
    "BSND": lambda x: x.transpose(1, 2),
    "BSH": lambda x: x.transpose(1, 2).flatten(2),
    "SBH": lambda x: x.permute(2, 0, 1, 3).flatten(2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same(layout: str) -> None:
    q, k, v, dy = (numbers(2, heads, 5, 8, seed=seed) for seed, heads in enumerate((4, 2, 2, 4)))
    more = {"sparse_mode": 3, "atten_mask": COMPRESSED, "scale": 0.3}
    there = LAYOUTS[layout]
    plain, other = call(q, k, v, "BNSD", 4, **more), call(there(q), there(k), there(v), layout, 4, **more)
    torch.testing.assert_close(attention.forward(other, 0, 0)[0], there(attention.forward(plain, 0, 0)[0]))
    torch.testing.assert_close(attention.forward(other, 0, 0)[1:3], attention.forward(plain, 0, 0)[1:3])
    back = {"seed": 0, "offset": 0}
    want = attention.backward(plain | back | {"dy": dy})[:3]
    got = attention.backward(other | back | {"dy": there(dy)})[:3]
    torch.testing.assert_close(got, tuple(map(there, want)))


@drawn_from(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=5), st.integers(0, 2))
def test_sequences_end_to_end_are_each_attended_alone(sizes: list[tuple[int, int]], left_out: int) -> None:
    queries = [size for size, _ in sizes]
    keys = [size + more for size, more in sizes]
    if sum(queries) == 0 or queries[-1] == 0:
        return
    q, k, v = numbers(sum(queries), 4, 8), numbers(sum(keys), 2, 8, seed=1), numbers(sum(keys), 2, 8, seed=2)
    ends = {
        "actual_seq_qlen": [*accumulate(queries), *[0] * left_out],
        "actual_seq_kvlen": [*accumulate(keys), *[0] * left_out],
    }
    more = {"sparse_mode": 3, "atten_mask": COMPRESSED, "scale": 0.3}
    out, top, total, *_ = attention.forward(call(q, k, v, "TND", 4, **more, **ends), 0, 0)
    assert out.shape == q.shape and top.shape == total.shape == (len(q), 4, 8)
    for a, b, c, o in zip(q.split(queries), k.split(keys), v.split(keys), out.split(queries), strict=True):
        one = [x.transpose(0, 1)[None] for x in (a, b, c)]
        want = by_definition(*one, band(len(a), len(b), 99, 0, True), 0.3)
        torch.testing.assert_close(o.transpose(0, 1)[None].double(), want, atol=1e-6, rtol=1e-5)


def test_the_statistics_are_those_of_the_softmax() -> None:
    q, k, v = (numbers(1, 2, 3, 4, seed=seed) for seed in range(3))
    _, top, total, *_ = attention.forward(call(q, k, v, "BNSD", 2, scale=0.5), 0, 0)
    scores = 0.5 * q.double() @ k.double().transpose(2, 3)
    torch.testing.assert_close(top[..., 0].double(), scores.amax(-1))
    torch.testing.assert_close(total[..., 7].double(), (scores - scores.amax(-1, keepdim=True)).exp().sum(-1))


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_that_of_the_definition(name: str) -> None:
    options, hides = CASES[name]
    hidden = hides(4, 6)
    if options.get("atten_mask") == "own":
        options = options | {"atten_mask": band(4, 6, 2, 1, False)}
    q, k, v = numbers(2, 4, 4, 8), numbers(2, 2, 6, 8, seed=1), numbers(2, 2, 6, 8, seed=2)
    dy = numbers(2, 4, 4, 8, seed=3)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    want = torch.autograd.grad(by_definition(*wide, hidden, 0.3), wide, dy.double())
    given = call(q, k, v, "BNSD", 4, **options) | {"dy": dy, "scale_value": 0.3, "seed": 0, "offset": 0}
    del given["scale"]
    for mine, theirs in zip(attention.backward(given)[:3], want, strict=True):
        torch.testing.assert_close(mine.double(), theirs, atol=1e-6, rtol=1e-4)


def test_dropout_drops_as_many_and_the_gradient_knows_which() -> None:
    q, k, v = (numbers(1, 2, 40, 8, seed=seed) for seed in range(3))
    given = call(q, k, torch.ones_like(v), "BNSD", 2, keep_prob=0.75)
    out = attention.forward(given, 5, 8)[0]
    assert abs(float(out.mean()) - 1.0) < 0.1, "kept ones are scaled, so that the mean stays"
    assert not torch.equal(out, attention.forward(given, 5, 12)[0])
    # linear in value: the gradient by value, times any value, is the output times dy
    dy = numbers(1, 2, 40, 8, seed=9)
    dv = attention.backward(given | {"dy": dy, "seed": 5, "offset": 8})[2]
    with_v = attention.forward(given | {"value": v}, 5, 8)[0]
    torch.testing.assert_close((dv * v).sum(), (dy * with_v).sum(), rtol=1e-4, atol=1e-4)


def rows(*shape: int) -> Tensor:
    return numbers(*shape)


Q, ENDS = rows(1, 2, 4, 8), {"actual_seq_qlen": [2, 4], "actual_seq_kvlen": [2, 4]}
TND = rows(4, 2, 8)
REFUSED = {
    "float64": (call(Q.double(), Q.double(), Q.double(), "BNSD", 2), "float16, bfloat16 and float32"),
    "two data types": (call(Q, Q.bfloat16(), Q, "BNSD", 2), "one data type"),
    "unknown layout": (call(Q, Q, Q, "BDNS", 2), "input_layout"),
    "wrong head_num": (call(Q, Q, Q, "BNSD", 4), "head_num is 4"),
    "head too large": (call(*[rows(1, 1, 2, 769)] * 3, "BNSD", 1), "769 is outside"),
    "value of another size": (call(Q, Q, rows(1, 2, 3, 8), "BNSD", 2), "differ"),
    "heads no multiple": (call(rows(1, 3, 4, 8), Q, Q, "BNSD", 3), "no multiple"),
    "float mask": (call(Q, Q, Q, "BNSD", 2, atten_mask=torch.zeros(4, 4)), "bool or uint8"),
    "mode without a mask": (call(Q, Q, Q, "BNSD", 2, sparse_mode=3), "masks nothing"),
    "mask not compressed": (
        call(Q, Q, Q, "BNSD", 2, sparse_mode=3, atten_mask=torch.ones(4, 4, dtype=torch.bool).triu(1)),
        r"\(2048, 2048\)",
    ),
    "mask the wrong way round": (
        call(Q, Q, Q, "BNSD", 2, sparse_mode=3, atten_mask=~COMPRESSED),
        "True above the diagonal",
    ),
    "a row that sees nothing": (
        call(Q, Q, Q, "BNSD", 2, sparse_mode=1, atten_mask=torch.ones(4, 4, dtype=torch.bool)),
        "inner_precise=2",
    ),
    "such a row end to end": (
        call(TND, rows(3, 2, 8), rows(3, 2, 8), "TND", 2, sparse_mode=3, atten_mask=COMPRESSED)
        | {"actual_seq_qlen": [2, 4], "actual_seq_kvlen": [1, 3]},
        "end to end",
    ),
    "no lengths": (call(TND, TND, TND, "TND", 2), "needs actual_seq_qlen"),
    "lengths with a leading zero that do not cover": (
        call(TND, TND, TND, "TND", 2, **ENDS | {"actual_seq_qlen": [0, 2]}),
        "ends at 2",
    ),
    "lengths that are not cumulative": (
        call(TND, TND, TND, "TND", 2, **ENDS | {"actual_seq_qlen": [3, 2, 4]}),
        "not cumulative",
    ),
    "too many sequences": (
        call(TND, TND, TND, "TND", 2, actual_seq_qlen=[1] * 1024 + [4], actual_seq_kvlen=[4] * 1025),
        "above 1024",
    ),
    "pse": (call(Q, Q, Q, "BNSD", 2, pse=torch.zeros(1)), "does not know pse"),
    "sparse mode 5": (call(Q, Q, Q, "BNSD", 2, sparse_mode=5), "not simulated"),
    "keep_prob 0": (call(Q, Q, Q, "BNSD", 2, keep_prob=0.0), "outside"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_attention_refuses_what_the_card_refuses(name: str) -> None:
    given, message = REFUSED[name]
    with pytest.raises(Refused, match=message):
        attention.forward(given, 0, 0)


def test_a_row_that_sees_nothing_is_zero_where_the_call_allows_it() -> None:
    hidden = torch.zeros(4, 4, dtype=torch.bool)
    hidden[1] = True
    given = call(Q, Q, Q, "BNSD", 2, sparse_mode=1, atten_mask=hidden, inner_precise=2)
    assert attention.forward(given, 0, 0)[0][:, :, 1].abs().max() == 0
    back = given | {"dy": torch.ones_like(Q), "seed": 0, "offset": 0}
    assert all(torch.isfinite(gradient).all() for gradient in attention.backward(back)[:3])


@pytest.mark.parametrize("shape", [(3, 16), (2, 3, 16)])
def test_rms_norm_and_its_gradient(shape: tuple[int, ...]) -> None:
    x, gamma, dy = numbers(*shape), numbers(16, seed=1), numbers(*shape, seed=2)
    wide = [t.double().requires_grad_() for t in (x, gamma)]
    want = F.rms_norm(wide[0], (16,), wide[1], 1e-6)
    y, rstd = operators.rms_norm({"input": x, "gamma": gamma, "epsilon": 1e-6})
    torch.testing.assert_close(y.double(), want.detach(), atol=1e-6, rtol=1e-5)
    assert rstd.shape == (*shape[:-1], 1) and rstd.dtype == torch.float32
    got = operators.rms_norm_backward({"dy": dy, "input": x, "gamma": gamma, "rstd": rstd})
    for mine, theirs in zip(got, torch.autograd.grad(want, wide, dy.double()), strict=True):
        torch.testing.assert_close(mine.double(), theirs, atol=1e-5, rtol=1e-5)
    both = operators.add_rms_norm({"x1": x, "x2": dy, "gamma": gamma, "epsilon": 1e-6})
    torch.testing.assert_close(both[0], operators.rms_norm({"input": x + dy, "gamma": gamma, "epsilon": 1e-6})[0])
    assert torch.equal(both[2], x + dy)


@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_rotary_mul_turns_pairs_and_its_gradient(mode: str) -> None:
    x, cos, sin, dy = (
        numbers(*s, seed=i) for i, s in enumerate([(2, 3, 5, 8), (1, 1, 5, 8), (1, 1, 5, 8), (2, 3, 5, 8)])
    )
    wide = [t.double().requires_grad_() for t in (x, cos, sin)]
    pairs = [(i, i + 4) for i in range(4)] if mode == "half" else [(i, i + 1) for i in range(0, 8, 2)]
    columns: dict[int, Tensor] = {}
    for a, b in pairs:  # (a, b) → (a cos − b sin, b cos + a sin)
        columns[a] = wide[0][..., a] * wide[1][..., a] - wide[0][..., b] * wide[2][..., a]
        columns[b] = wide[0][..., b] * wide[1][..., b] + wide[0][..., a] * wide[2][..., b]
    want = torch.stack([columns[i] for i in range(8)], -1)
    given = {"input": x, "r1": cos, "r2": sin, "rotary_mode": mode}
    torch.testing.assert_close(operators.rotary_mul(given).double(), want.detach())
    got = operators.rotary_mul_backward(given | {"grad": dy})
    for mine, theirs in zip(got, torch.autograd.grad(want, wide, dy.double()), strict=True):
        torch.testing.assert_close(mine.double(), theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dim", [-1, 0])
def test_swiglu_and_its_gradient(dim: int) -> None:
    x = numbers(6, 8)
    wide = x.double().requires_grad_()
    gate, up = wide.chunk(2, dim)
    want = F.silu(gate) * up
    dy = numbers(*want.shape, seed=1)
    torch.testing.assert_close(operators.swiglu({"input": x, "dim": dim}).double(), want.detach())
    got = operators.swiglu_backward({"grad_output": dy, "input": x, "dim": dim})
    torch.testing.assert_close(got.double(), torch.autograd.grad(want, wide, dy.double())[0], atol=1e-6, rtol=1e-5)


GROUPED = {"bias": None, "split_item": 3, "group_type": 0, "group_list_type": 0}


def test_grouped_products_of_rows_and_of_sums() -> None:
    x, weight, bias = numbers(5, 4), numbers(3, 4, 6, seed=1), numbers(3, 6, seed=2)
    ends, sizes = torch.tensor([2, 2, 5]), torch.tensor([2, 0, 3])
    want = torch.cat([x[:2] @ weight[0] + bias[0], x[2:] @ weight[2] + bias[2]])
    by_row = GROUPED | {"x": [x], "weight": [weight], "bias": [bias]}
    [got] = operators.grouped_matmul(by_row | {"group_list": ends})
    torch.testing.assert_close(got, want)
    lists = {"weight": list(weight), "bias": list(bias), "group_list": sizes, "group_list_type": 1}
    torch.testing.assert_close(operators.grouped_matmul(by_row | lists)[0], want)
    grad = numbers(5, 6, seed=3)
    by_sum = GROUPED | {"x": [x.t()], "weight": [grad], "group_list": ends, "group_type": 2}
    [of_weight] = operators.grouped_matmul(by_sum)
    torch.testing.assert_close(of_weight, torch.stack([x[:2].t() @ grad[:2], torch.zeros(4, 6), x[2:].t() @ grad[2:]]))


def test_adam_w_is_torchs() -> None:
    parameter = torch.nn.Parameter(numbers(4, 3))
    optimizer = torch.optim.AdamW([parameter], lr=0.01, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1)
    out = (parameter.detach().clone(), torch.zeros(4, 3), torch.zeros(4, 3))
    for step in range(3):
        parameter.grad = numbers(4, 3, seed=step + 1)
        optimizer.step()
        powers = {"beta1_power": 0.9**step, "beta2_power": 0.99**step, "beta1": 0.9, "beta2": 0.99}
        rates = {"lr": 0.01, "weight_decay": 0.1, "epsilon": 1e-6}
        operators.apply_adam_w(
            powers
            | rates
            | {"grad": parameter.grad, "max_grad_norm": None, "amsgrad": False, "maximize": False, "out": out}
        )
    torch.testing.assert_close(out[0], parameter.detach(), atol=1e-6, rtol=1e-5)


def test_what_was_gathered_goes_back() -> None:
    x, index, dy = numbers(3, 4).requires_grad_(), torch.tensor([[0, 3], [1, 1], [2, 0]]), numbers(3, 2, seed=1)
    [want] = torch.autograd.grad(x.gather(1, index), x, dy)
    given = {"grad": dy, "self_size": [3, 4], "dim": 1, "index": index, "sparse_grad": False}
    assert torch.equal(operators.gather_backward(given), want)


@pytest.mark.parametrize(
    ("function", "given", "message"),
    [
        (operators.rms_norm, {"input": Q.double(), "gamma": Q.double()[0, 0, 0], "epsilon": 1e-6}, "float64"),
        (operators.rms_norm, {"input": Q, "gamma": rows(9), "epsilon": 1e-6}, "last dimensions"),
        (operators.rotary_mul, {"input": Q[0], "r1": Q[0], "r2": Q[0], "rotary_mode": "half"}, "4 dimensions"),
        (operators.rotary_mul, {"input": Q, "r1": Q.bfloat16(), "r2": Q, "rotary_mode": "half"}, "one data type"),
        (operators.rotary_mul, {"input": Q, "r1": Q, "r2": Q, "rotary_mode": "quarter"}, "unknown"),
        (
            operators.rotary_mul,
            dict.fromkeys(("input", "r1", "r2"), rows(1, 1, 2, 896)) | {"rotary_mode": "half"},
            "896",
        ),
        (operators.swiglu, {"input": rows(2, 5), "dim": -1}, "odd size 5"),
        (
            operators.grouped_matmul,
            GROUPED | {"x": [rows(5, 4)], "weight": [rows(2, 4, 6)], "group_list": [2, 4]},
            "4 of 5",
        ),
        (
            operators.grouped_matmul,
            GROUPED | {"x": [rows(5, 4)], "weight": [rows(2, 4, 6)], "group_list": [5, 2]},
            "rising",
        ),
        (operators.dtype_cast, {"input": Q, "dtype": 5}, "no data type"),
    ],
)
def test_the_others_refuse_what_the_card_refuses(function: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused, match=message):
        function(given)


def test_random_numbers_depend_on_seed_and_offset_alone() -> None:
    def first(seed: int, offset: int) -> list[float]:
        return torch.rand(3, generator=stream(seed, offset)).tolist()

    assert first(7, 0) == torch.rand(3, generator=torch.Generator().manual_seed(7)).tolist()
    assert first(7, 4) == first(7, 4) != first(7, 8) != first(7, 0)
    assert first(8, 4) != first(7, 4)
