"""What the adapters for Ascend NPUs call fits the operators of the real torch_npu. Needs no torch_npu itself.

`npu_schemas.json` holds the operators' schemas, read from the wheel by `snapshot.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from npu_simulator import attention
from npu_simulator.operators import OPERATORS
from npu_simulator.schema import bound
from runner.device import fused_modules, npu
from runner.device.fused_modules import grouped_experts_forward
from runner.device.npu import FusionAttention
from runner.interfaces import SequenceLengths

SCHEMAS = json.loads((Path(__file__).parent / "npu_schemas.json").read_text())


def strict(name: str, function: Callable[[Any], Any]) -> Callable[..., Any]:
    """An operator that takes exactly what the real one's schema takes."""
    schema = torch._C.parse_schema(SCHEMAS[name])

    def operator(*args: Any, **options: Any) -> Any:
        given = bound(schema, args, options)
        for argument in schema.arguments:
            value = given[argument.name]
            assert value is None or argument.type.kind() != "ListType" or isinstance(value, list | tuple), argument.name
        return function(given)

    return operator


def test_every_operator_that_the_adapters_name_is_in_the_snapshot() -> None:
    sources = [Path(module.__file__).read_text() for module in (npu, fused_modules)]
    named = {name for text in sources for name in re.findall(r"\bnpu_[a-z_]+\b", text)}
    operators = {
        name for name in named if not name.startswith(("npu_attention", "npu_experts", "fused_modules", "npu_stats"))
    }
    assert operators and operators - SCHEMAS.keys() == set()


def test_every_operator_of_the_simulator_is_in_the_snapshot() -> None:
    assert OPERATORS.keys() - SCHEMAS.keys() == set()


@pytest.mark.parametrize("window", [None, 2])
def test_the_attention_adapters_call_fits_and_means_causal_attention(window: int | None) -> None:
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(7, heads, 8, generator=random) for heads in (4, 2, 2))
    fused = FusionAttention(strict("npu_fusion_attention", lambda given: attention.forward(given, 0, 0)))
    lengths = dict.fromkeys(("queries", "keys"), SequenceLengths.of((3, 4), torch.device("cpu")))
    got = fused(q, k, v, **lengths, window=window, dropout=0.0, scale=0.3)
    for a, b, c, out in zip(q.split([3, 4]), k.split([3, 4]), v.split([3, 4]), got.split([3, 4]), strict=True):
        seen = torch.ones(len(a), len(a), dtype=torch.bool).tril().triu(1 - (window or len(a)))
        own = [x.transpose(0, 1)[None] for x in (a, b, c)]
        want = F.scaled_dot_product_attention(*own, attn_mask=seen, scale=0.3, enable_gqa=True)
        torch.testing.assert_close(out.transpose(0, 1)[None], want, atol=1e-6, rtol=1e-5)


def test_the_experts_call_fits_and_means_a_product_for_each_expert() -> None:
    random = torch.Generator().manual_seed(0)
    experts = SimpleNamespace(
        num_experts=3,
        gate_up_proj=torch.randn(3, 12, 8, generator=random),
        down_proj=torch.randn(3, 8, 6, generator=random),
    )
    hidden, chosen = torch.randn(5, 8, generator=random), torch.tensor([[0, 2], [2, 0], [0, 1], [2, 1], [0, 2]])
    weights = torch.rand(5, 2, generator=random)
    names = ("npu_swiglu", "npu_grouped_matmul")
    operators = SimpleNamespace(**{name: strict(name, OPERATORS[name]) for name in names})
    got = grouped_experts_forward(experts, hidden, chosen, weights, operators)
    want = torch.zeros_like(hidden)
    for token in range(5):
        for expert, weight in zip(chosen[token].tolist(), weights[token], strict=True):
            gate, up = (experts.gate_up_proj[expert] @ hidden[token]).chunk(2)
            want[token] += weight * (experts.down_proj[expert] @ (F.silu(gate) * up))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda operator, x: operator(x, x[0], eps=1e-6), "no parameter eps; it has input, gamma, epsilon"),
        (lambda operator, x: operator(x), "needs gamma"),
        (lambda operator, x: operator(x, x[0], 1e-6, 4), "3 arguments by position"),
        (lambda operator, x: operator(x, x[0], input=x), "no parameter input"),
    ],
)
def test_a_call_that_does_not_fit_is_refused(call: Callable[..., Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call(strict("npu_rms_norm", OPERATORS["npu_rms_norm"]), torch.ones(2, 4))
