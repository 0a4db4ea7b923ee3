"""Fused operators in models of every family: the same numbers, said; and refused where they are not the same."""

from __future__ import annotations

from copy import deepcopy
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from runner.adapter.config import LoraConfig
from runner.adapter.lora import attach
from runner.cli.job_builder import compose_job
from runner.core.auto_choices import Decisions
from runner.core.errors import EnvironmentProblem, SpecError
from runner.device.fused_modules import FUSED_MODULES, install_fused_ops, install_liger_kernels
from runner.device.npu import FusionAttention
from tests.device import operators
from tests.device.cases import FAMILIES
from tests.model import zoo

IDS = torch.tensor([zoo.rows((11,))[0], zoo.rows((11,), seed=2)[0]])


def fused(module: Any, wanted: tuple[str, ...] = tuple(FUSED_MODULES), given: Any = operators) -> tuple[Any, Decisions]:
    """A copy of the module with the operators in it, and what was said."""
    copy, decisions = deepcopy(module), Decisions()
    install_fused_ops(copy, wanted, given, decisions)
    return copy, decisions


def outcome(module: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and the gradients of a sum over them."""
    module.zero_grad()
    logits = module(input_ids=IDS, use_cache=False).logits
    (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits).to(logits.dtype)).sum().backward()
    return logits.detach(), {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def said(decisions: Decisions) -> dict[str, str]:
    return {fact["feature"].removeprefix("device.fused_ops."): fact["value"] for fact in decisions.records()["facts"]}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("wanted", [*((name,) for name in FUSED_MODULES), tuple(FUSED_MODULES)], ids="+".join)
def test_a_model_gives_the_same_with_them_forward_and_backward(family: str, wanted: tuple[str, ...]) -> None:
    own = zoo.module(family).requires_grad_(True)
    ours, decisions = fused(own, wanted)
    assert not [d for d in decisions.entries if not d.is_fact]
    fits = family == "qwen3_moe" or "grouped_matmul" not in wanted or len(wanted) > 1
    assert bool(said(decisions)) == fits
    assert ("experts" in said(decisions)) == (family == "qwen3_moe" and "grouped_matmul" not in wanted)
    (logits, gradients), (wanted_logits, wanted_gradients) = outcome(ours), outcome(own)
    torch.testing.assert_close(logits, wanted_logits, rtol=1e-4, atol=1e-4)
    assert zoo.relative(gradients, wanted_gradients) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_in_bfloat16_it_differs_by_its_rounding_alone(family: str) -> None:
    own = zoo.module(family).to(torch.bfloat16)
    exact = outcome(zoo.module(family))[0]
    ours, decisions = fused(own)
    assert not [d for d in decisions.entries if not d.is_fact]
    scale = float(exact.abs().max())
    of_ours, of_own = ((outcome(m)[0].float() - exact).square().mean().sqrt() / scale for m in (ours, own))
    assert of_ours < 1.5 * of_own + 1e-3, "no further from float32 than transformers' own is"


def test_every_module_of_a_kind_is_counted_and_classes_are_left_alone() -> None:
    own = zoo.module("qwen3_moe")
    ours, decisions = fused(own)
    assert said(decisions) == {
        "rms_norm": "9 modules",  # two and two of heads in each of two layers, and the last
        "rotary": "2 modules",
        "swiglu": "1 modules",
        "grouped_matmul": "1 modules",
    }
    patched = {type(m).__name__ for m in ours.modules() if "forward" in vars(m)}
    assert patched == {"Qwen3MoeRMSNorm", "Qwen3MoeAttention", "Qwen3MoeMLP", "Qwen3MoeExperts"}
    assert not [m for m in zoo.module("qwen3_moe").modules() if "forward" in vars(m)]


def test_a_copy_runs_on_its_own_weights() -> None:
    ours, _ = fused(zoo.module("qwen3"))
    copy = deepcopy(ours)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.zero_()
        assert float(copy(input_ids=IDS).logits.abs().max()) > 0 == float(ours(input_ids=IDS).logits.abs().max())


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_checkpointing_adapters_and_bfloat16_go_on_working(family: str) -> None:
    """The whole way: packed rows, the fused attention, LoRA around the patched modules, recomputation in bfloat16."""
    data = zoo.batch()
    outcomes = []
    for operators_in in (False, True):
        model = zoo.causal(family, gradient_checkpointing=True, dtype="bfloat16")
        model.module.requires_grad_(False)
        if operators_in:
            install_fused_ops(model.inner, tuple(FUSED_MODULES), operators, Decisions())
            model.set_varlen_kernel(FusionAttention(operators.npu_fusion_attention), decide=(decisions := Decisions()))
            assert decisions.entries == [] and model._kernel is not None
        adapted = attach(LoraConfig(rank=4, targets=("q_proj", "o_proj")), model, decide=Decisions())
        assert (adapted._kernel is not None) == operators_in
        outcomes.append(zoo.gradients(adapted, linear=True, data=data))
    assert zoo.relative(*outcomes) < 0.1


def test_other_families_are_left_alone_and_this_is_said() -> None:
    decisions = Decisions()
    install_fused_ops(zoo.module("mistral"), tuple(FUSED_MODULES), operators, decisions)
    [decision] = decisions.entries
    assert (decision.got, "mistral is none of" in decision.reason) == ("none", True)
    with pytest.raises(EnvironmentProblem, match="mistral"):
        install_fused_ops(zoo.module("mistral"), tuple(FUSED_MODULES), operators, Decisions(strict=True))
    install_fused_ops(
        zoo.module("mistral"), (), operators, Decisions(strict=True)
    )  # nothing asked for, nothing refused


WRONG: dict[str, tuple[str, Any]] = {
    "rms_norm": ("npu_rms_norm", lambda x, g, e: operators.npu_rms_norm(x, 1 + g, e)),  # another family's weight
    "rotary": ("npu_rotary_mul", lambda x, c, s, m: operators.npu_rotary_mul(x, c, s, "interleave")),
    "swiglu": ("npu_swiglu", lambda x, dim: operators.npu_swiglu(torch.cat(x.chunk(2, dim)[::-1], dim), dim)),
    "grouped_matmul": (
        "npu_grouped_matmul",
        lambda x, w, group_list, **o: operators.npu_grouped_matmul(x, [w[0].flip(0)], group_list=group_list, **o),
    ),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("missing", [False, True])
def test_an_operator_that_gives_something_else_or_is_absent_is_not_used(name: str, missing: bool) -> None:
    operator, wrong = WRONG[name]
    given = SimpleNamespace(**{key: value for key, value in vars(operators).items() if key.startswith("npu_")})
    if missing:
        delattr(given, operator)
    else:
        setattr(given, operator, wrong)
    ours, decisions = fused(zoo.module("qwen3_moe"), (name,), given)
    decision = decisions.entries[0]
    assert decision.feature == f"device.fused_ops.{name}" and decision.got == "transformers' own"
    assert [d.feature for d in decisions.entries[1:]] == ["experts"]
    assert not [m for m in ours.modules() if "forward" in vars(m)]


class Backwards(torch.autograd.Function):
    """The identity, whose gradient has the other sign."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


def backwards(x: Tensor) -> Tensor:
    return Backwards.apply(x)


WRONG_GRADIENT: dict[str, tuple[str, Any]] = {
    "rms_norm": ("npu_rms_norm", lambda x, g, e: operators.npu_rms_norm(x, backwards(g), e)),
    "rotary": ("npu_rotary_mul", lambda x, c, s, m: operators.npu_rotary_mul(backwards(x), c, s, m)),
    "swiglu": ("npu_swiglu", lambda x, dim: operators.npu_swiglu(backwards(x), dim)),
    "grouped_matmul": (  # along the sum, which is the gradient of weights
        "npu_grouped_matmul",
        lambda x, w, group_type, **o: [
            t.flip(0) if group_type == 2 else t for t in operators.npu_grouped_matmul(x, w, group_type=group_type, **o)
        ],
    ),
}


@pytest.mark.parametrize("name", WRONG_GRADIENT)
@pytest.mark.parametrize("missing", [False, True])
def test_an_operator_whose_gradient_is_another_or_absent_is_not_used(name: str, missing: bool) -> None:
    operator, wrong = WRONG_GRADIENT[name]

    def without(*args: Any, **options: Any) -> Any:
        if options.get("group_type") == 2:
            raise RuntimeError("group_type 2 is not supported here")
        out = getattr(operators, operator)(*args, **options)
        if name == "grouped_matmul":
            return out
        return out.detach() if isinstance(out, Tensor) else [t.detach() for t in out]

    given = SimpleNamespace(**{key: value for key, value in vars(operators).items() if key.startswith("npu_")})
    setattr(given, operator, without if missing else wrong)
    ours, decisions = fused(zoo.module("qwen3_moe").requires_grad_(True), (name,), given)
    assert (
        decisions.entries[0].feature == f"device.fused_ops.{name}" and decisions.entries[0].got == "transformers' own"
    )
    assert missing or decisions.entries[0].reason == "the operator's gradient differs from the module's"
    assert not [m for m in ours.modules() if "forward" in vars(m)]


def test_another_activation_is_refused() -> None:
    _, decisions = fused(zoo.module("llama", hidden_act="gelu"), ("swiglu",))
    assert "GELU" in decisions.entries[0].reason


def test_no_expert_may_be_left_without_tokens_or_with_all() -> None:
    own = zoo.module("qwen3_moe").requires_grad_(True)
    with torch.no_grad():
        own.model.layers[0].mlp.gate.weight.zero_()  # every token then goes to the same experts
    ours, _ = fused(own, ("grouped_matmul",))
    (logits, gradients), (wanted, wanted_gradients) = outcome(ours), outcome(own)
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
    assert zoo.relative(gradients, wanted_gradients) < 1e-4


class Rope(torch.autograd.Function):
    """As LigerRopeFunction: it writes over queries and keys that lie token by token, and their gradients."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, _: None, unsqueeze_dim: int) -> Any:
        ctx.angles = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return tuple(Rope.turn(x, *ctx.angles) for x in (q, k))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        cos, sin = ctx.angles
        return *(Rope.turn(x, cos, -sin) for x in grads), None, None, None, None

    @staticmethod
    def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
        first, second = x.chunk(2, -1)
        x.data.copy_(x * cos + torch.cat([-second, first], -1) * sin)
        return x


def liger_norm(x: Tensor, weight: Tensor, eps: float, offset: float, casting: str, in_place: bool) -> Tensor:
    assert (casting, in_place) == ("llama", False)
    wide = x.float()
    return (offset + weight) * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


LIGER = SimpleNamespace(
    LigerRMSNormFunction=SimpleNamespace(apply=liger_norm),
    LigerRopeFunction=Rope,
    LigerSiLUMulFunction=SimpleNamespace(apply=lambda gate, up: functional.silu(gate) * up),
)


@pytest.mark.parametrize("family", FAMILIES)
def test_liger_kernels_give_the_same_in_every_family(family: str) -> None:
    own, decisions = zoo.module(family).requires_grad_(True), Decisions(strict=True)
    ours = deepcopy(own)
    install_liger_kernels(ours, LIGER, decisions)
    facts = [fact["feature"] for fact in decisions.records()["facts"]]
    assert facts == ["model.kernels.rms_norm", "model.kernels.rotary", "model.kernels.swiglu"]
    (logits, gradients), (wanted_logits, wanted_gradients) = outcome(ours), outcome(own)
    torch.testing.assert_close(logits, wanted_logits, rtol=1e-4, atol=1e-4)
    assert zoo.relative(gradients, wanted_gradients) < 1e-4
    assert not [m for m in zoo.module(family).modules() if "forward" in vars(m)], "other models keep their own"


def test_a_liger_kernel_that_gives_something_else_is_not_used() -> None:
    wrong = SimpleNamespace(**vars(LIGER) | {"LigerSiLUMulFunction": SimpleNamespace(apply=lambda gate, up: gate * up)})
    install_liger_kernels(zoo.module("qwen3"), wrong, decisions := Decisions())
    [decision] = [d for d in decisions.entries if not d.is_fact]
    assert (decision.feature, decision.got) == ("model.kernels.swiglu", "transformers' own")


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_liger_rotary_overwrites_what_selective_recomputation_keeps(family: str) -> None:
    """Why the two are refused together; layers that are recomputed from their input are right."""
    for way, is_right in ((True, True), ("selective", False)):
        found = []
        for installs in (False, True):
            model = zoo.causal(family, gradient_checkpointing=way)
            if installs:
                install_liger_kernels(model.inner, LIGER, Decisions(strict=True))
            found.append(zoo.gradients(model, True, zoo.batch()))
        assert (zoo.relative(*found) < 1e-4) == is_right


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((), "need an NVIDIA GPU; leave it out, or type device=cuda"),
        (("device=npu",), r"has fused operators of its own \(device.fused_ops\); leave it out"),
        (("device=cuda", "model.compile=true"), "fuses the same operations"),
        (("device=cuda", "model.gradient_checkpointing=selective"), "type model.gradient_checkpointing=true"),
    ],
)
def test_liger_is_refused_where_it_cannot_run_or_would_be_wrong(words: tuple[str, ...], reason: str) -> None:
    with pytest.raises(SpecError, match=f"model.kernels: liger: .*{reason}"):
        compose_job(["+recipe=sft_demo", "model.kernels=liger", *words])


@pytest.mark.skipif(find_spec("liger_kernel") is not None, reason="Liger-Kernel is installed")
def test_liger_on_cuda_is_a_job_and_says_what_to_install() -> None:
    job = compose_job(["+recipe=sft_demo", "model.kernels=liger", "device=cuda"])
    with pytest.raises(EnvironmentProblem, match=r'pip install "posttrain-run\[liger\]"'):
        job.spec.model.preflight()
