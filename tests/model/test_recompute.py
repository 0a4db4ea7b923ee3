"""What layers recompute and keep: the same gradients, bit for bit, from the layers and operators that are meant."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from runner.adapter import lora
from runner.adapter.config import LoraConfig
from runner.cli.job_builder import compose_job
from runner.core.auto_choices import Decisions
from runner.core.errors import EnvironmentProblem, SpecError
from runner.model import checkpointing_and_compile
from runner.model.causal_lm import CausalLM
from tests.model.zoo import batch, causal, gradients

WAYS = [True, "selective", 2, 3]
LAYERS = 4


def made(kind: str, way: bool | int | str, adapter: float | None = None, **options: Any) -> Any:
    """A model of four layers; adapter: the dropout of a LoRA."""
    model: Any = causal(kind, num_hidden_layers=LAYERS, gradient_checkpointing=way, **options)
    if adapter is not None:
        model = lora.attach(LoraConfig(rank=4, dropout=adapter), model, decide=Decisions())
        for name, parameter in model.trainable().items():
            if "lora_B" in name:
                parameter.data.normal_(generator=torch.Generator().manual_seed(len(name)), std=0.1)
    return model


def same(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return got.keys() == wanted.keys() and all(torch.equal(got[name], wanted[name]) for name in wanted)


def found(model: CausalLM) -> dict[str, Tensor]:
    torch.manual_seed(7)  # of dropout
    return gradients(model, True, batch())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("qwen2", {"dtype": "bfloat16"}),
        ("qwen3_moe", {}),
        ("mistral", {"batch_layout": "padded"}),
        ("gpt2", {"attn_pdrop": 0.3, "resid_pdrop": 0.3}),
    ],
    ids=["bfloat16", "experts", "padded", "dropout"],
)
def test_gradients_are_equal_bit_for_bit(kind: str, options: dict[str, Any], way: bool | int | str) -> None:
    layers = {} if kind == "gpt2" else {"num_hidden_layers": LAYERS}
    plain, other = (causal(kind, gradient_checkpointing=how, **layers, **options) for how in (False, way))
    assert same(found(other), found(plain))


@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_adapters_with_dropout_are_equal_bit_for_bit(way: bool | int | str) -> None:
    wanted = found(made("llama", False, 0.3))
    assert same(found(made("llama", way, 0.3)), wanted) and not same(found(made("llama", False, 0.0)), wanted)


@pytest.mark.parametrize(
    ("way", "twice"), [(False, []), (True, [0, 1, 2, 3]), ("selective", [0, 1, 2, 3]), (2, [0, 2]), (3, [0, 3])]
)
def test_these_layers_run_twice_in_a_pass_with_gradient_and_once_without(
    way: bool | int | str, twice: list[int]
) -> None:
    model, calls = made("qwen2", way), Counter[int]()
    for place, layer in enumerate(model.causal.model.layers):
        layer.mlp.register_forward_pre_hook(lambda *_, place=place: calls.update([place]))
    found(model)
    assert [place for place in range(LAYERS) if calls[place] == 2] == twice
    calls.clear()
    with torch.no_grad():
        model.outputs(batch(), frozenset({"logprobs"}))
    assert calls == dict.fromkeys(range(LAYERS), 1)


class Operators(TorchDispatchMode):
    """Counts the products and the calls of attention's kernel that really run."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function).removeprefix("aten.").removesuffix(".default")
        if function in checkpointing_and_compile.PRODUCTS:
            name = "product"
        self.calls[name] += 1
        return function(*args, **(kwargs or {}))


def run_again(way: bool | int | str, adapter: float | None = None) -> dict[str, int]:
    """How often an operator runs in a backward pass with `way`, beyond those of one without."""
    counts = []
    for how in (False, way):
        model, operators = made("llama", how, adapter), Operators()
        total = model.linear_loss(batch(), batch().tokens["weight"])[0]
        with operators:
            total.backward()
        counts.append(operators.calls)
    names = ("product", "_scaled_dot_product_flash_attention_for_cpu")
    return {name: counts[1][name] - counts[0][name] for name in names}


def test_selective_runs_half_of_the_products_again_and_no_attention() -> None:
    """Of seven products of a layer the last is read by nothing; of the other six three are kept. Six rows each."""
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    calls = 6 * LAYERS if Version(torch.__version__) >= Version("2.10") else 0  # 2.7's kernel has no grouped queries
    assert run_again(True) == {"product": 6 * LAYERS, attention: calls}
    assert run_again("selective") == {"product": 3 * LAYERS, attention: 0}


def test_narrow_products_of_adapters_are_not_counted() -> None:
    def policy(*sizes: tuple[int, int]) -> list[bool]:
        chosen, context = checkpointing_and_compile.SelectivePolicy(), SelectiveCheckpointContext(is_recompute=False)
        return [
            chosen(context, torch.ops.aten.mm.default, torch.empty(5, k), torch.empty(k, n))
            is CheckpointPolicy.MUST_SAVE
            for k, n in sizes
        ]

    assert policy((64, 64), (64, 4), (4, 64), (64, 64), (64, 128), (64, 128)) == [
        False,
        False,
        False,
        True,
        False,
        True,
    ]


def test_attention_that_draws_random_numbers_runs_again() -> None:
    """Left out, it would draw nothing, and dropout after it would draw other numbers than in the first pass."""

    class Operator:
        _schema = SimpleNamespace(
            arguments=[SimpleNamespace(name=name) for name in ("query", "dropout_p", "keep_prob")]
        )

        def __str__(self) -> str:
            return "some.attention.default"

    def kept(*arguments: Any, **named: Any) -> bool:
        context = SelectiveCheckpointContext(is_recompute=False)
        return (
            checkpointing_and_compile.SelectivePolicy()(context, Operator(), *arguments, **named)
            is CheckpointPolicy.MUST_SAVE
        )

    assert kept(None) and kept(None, 0.0) and kept(None, keep_prob=1.0)
    assert not kept(None, 0.1) and not kept(None, keep_prob=0.9)


def test_a_model_that_cannot_says_so() -> None:
    class Plain(nn.Module):
        supports_gradient_checkpointing = False

    decisions = Decisions()
    checkpointing_and_compile.enable_checkpointing(Plain(), 2, offload=False, decide=decisions)
    assert [(d.feature, d.wanted, d.got) for d in decisions.entries] == [("model.gradient_checkpointing", "2", "false")]
    with pytest.raises(EnvironmentProblem, match="strict"):
        checkpointing_and_compile.enable_checkpointing(Plain(), 2, offload=False, decide=Decisions(strict=True))


@pytest.mark.parametrize("supports", [True, False])
def test_offloading_that_a_model_cannot_do_is_a_decision(supports: bool) -> None:
    class Plain(nn.Module):
        supports_gradient_checkpointing = supports

        def gradient_checkpointing_enable(self, options: object) -> None: ...

    decisions = Decisions()
    checkpointing_and_compile.enable_checkpointing(Plain(), True, offload=True, decide=decisions)
    found = {d.feature: (d.wanted, d.got) for d in decisions.entries}
    assert found.pop("model.activation_offloading") == ("true", "false")
    assert found == ({} if supports else {"model.gradient_checkpointing": ("true", "false")})
    with pytest.raises(EnvironmentProblem, match="strict"):
        checkpointing_and_compile.enable_checkpointing(Plain(), True, offload=True, decide=Decisions(strict=True))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model.gradient_checkpointing=1"], "true or false or 'selective' or an integer at least 2, got 1"),
        (["model.gradient_checkpointing=full"], "true or false or 'selective'"),
        (["model.activation_checkpointing=true"], "type model.gradient_checkpointing=true"),
        (["model.offload_activations=true"], "model.activation_offloading=true"),
        (["model.activation_offloading=true", "device=npu"], "type model.gradient_checkpointing=true"),
        (["model.activation_offloading=true", "model.gradient_checkpointing=2", "device=cpu"], "in host memory"),
    ],
)
def test_what_cannot_be_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(SpecError) as error:
        compose_job(words)
    assert said in str(error.value)
