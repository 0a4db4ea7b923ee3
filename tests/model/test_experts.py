"""Experts as grouped products: the numbers of the loop over experts, by as many operators for many as for few."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from runner.adapter.config import LoraConfig
from runner.adapter.lora import attach
from runner.core.auto_choices import Decisions
from runner.core.errors import EnvironmentProblem
from runner.device.cuda import record_experts
from runner.model import checkpointing_and_compile
from tests.model import zoo

EXPERTS = ("gate_proj", "up_proj", "down_proj")


class Launches(TorchDispatchMode):
    """Counts the operators that are called in its block; refuses one that reads a number of a tensor."""

    def __init__(self, refuse_reads: bool = False) -> None:
        super().__init__()
        self.count, self._refuses = 0, refuse_reads

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self._refuses and func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("called a synchronizing operation")
        self.count += 1
        return func(*args, **(kwargs or {}))


def mixture(loops: bool, adapter: bool = False, **options: Any) -> Any:
    """A model whose layers all have experts, with the implementation of transformers, or the loop."""
    model = zoo.causal("qwen3_moe", **{"num_experts": 8, "mlp_only_layers": []} | options)
    if loops:
        model.inner.set_experts_implementation("eager")
    if adapter:
        model = attach(LoraConfig(rank=4, targets=EXPERTS), model, decide=Decisions())
        for name, parameter in model.trainable().items():
            if "lora_B" in name:
                parameter.data.normal_(generator=torch.Generator().manual_seed(len(name)), std=0.1)
    return model


def learned(model: Any, given: Tensor | None = None) -> dict[str, Tensor]:
    """Log-probabilities and gradients of a batch; given: the experts of its tokens."""
    data = zoo.batch()
    if given is not None:
        assert model.hook_routers() is None
        model.routing.replays, data.tokens["experts"] = "sampler", given
    found = zoo.gradients(model, True, data)
    with torch.no_grad():
        return found | {"logprobs": model.outputs(data, zoo.LOGPROBS)["logprobs"]}


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({}, 1e-5),
        ({"adapter": True}, 1e-5),
        ({"gradient_checkpointing": True}, 1e-5),
        ({"gradient_checkpointing": "selective", "adapter": True}, 1e-5),
        ({"dtype": "bfloat16"}, 0.05),
    ],
    ids=["full", "adapter on experts", "recomputed", "adapter, selective", "bfloat16"],
)
@pytest.mark.parametrize("replayed", [False, True], ids=["", "replay"])
def test_values_and_gradients_are_those_of_the_loop(options: dict[str, Any], limit: float, replayed: bool) -> None:
    scores = torch.rand(zoo.batch().num_tokens, 2, 8, generator=torch.Generator().manual_seed(11))
    given = scores.topk(2).indices.to(torch.int16) if replayed else None
    own, loop = (learned(mixture(loops, **options), given) for loops in (False, True))
    for name in ("logprobs", *own):
        assert zoo.relative({name: own[name]}, {name: loop[name]}) < limit or not loop[name].any(), name


def launches(loops: bool, experts: int, **options: Any) -> int:
    """Operators of a forward and a backward pass over two layers with so many experts."""
    model, data = mixture(loops, num_experts=experts, **options), zoo.batch()
    zoo.gradients(model, True, data)
    with Launches() as seen:
        zoo.gradients(model, True, data)
    return seen.count


@pytest.mark.parametrize("options", [{}, {"adapter": True}, {"gradient_checkpointing": True}], ids=str)
def test_operators_do_not_grow_with_the_number_of_experts(options: dict[str, Any]) -> None:
    assert launches(False, 4, **options) == launches(False, 64, **options)
    assert launches(True, 64, **options) > 2 * launches(True, 4, **options), "the loop's do"


# torch hides them from users, as it looks into every tensor and function that it traces
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a:UserWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_layers_are_one_graph_with_the_grouped_product(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[str]()

    def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph  # type: ignore[no-any-return]

    options = {"dynamic": True, "backend": backend, "fullgraph": True}
    monkeypatch.setattr(checkpointing_and_compile, "OPTIONS", options)
    monkeypatch.setattr(checkpointing_and_compile, "compiler_problem", lambda *_: None)
    torch._dynamo.reset()
    counters.clear()
    model = mixture(False, dtype="bfloat16")
    plain = zoo.gradients(model, True, zoo.batch())
    model.compile(Decisions(strict=True))
    assert model._compiled is not None
    assert zoo.relative(zoo.gradients(model, True, zoo.batch()), plain) < 1e-6
    assert sum("_grouped_mm" in name for name in seen) == 2 and not counters["graph_break"]


@pytest.mark.parametrize("loops", [False, True])
def test_a_line_says_whether_a_card_multiplies_them_at_once(loops: bool) -> None:
    decisions = Decisions(strict=not loops)
    record_experts(mixture(loops).inner, lambda: Launches(refuse_reads=True), decisions)
    [found] = decisions.entries
    assert (found.feature, found.wanted) == ("experts", "grouped products")
    assert found.got == ("one after the other" if loops else "grouped products")
    if loops:
        with pytest.raises(EnvironmentProblem, match="strict=true does not allow"):
            record_experts(mixture(loops).inner, lambda: Launches(refuse_reads=True), Decisions(strict=True))


def test_no_line_speaks_of_experts_that_are_not_there() -> None:
    record_experts(zoo.module("qwen3"), Launches, decisions := Decisions())
    assert not decisions.records()["facts"]
