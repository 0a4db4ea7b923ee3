"""Fused operators in transformers models, of Ascend NPUs and Liger-Kernel: which module takes which.

    rms_norm        npu_rms_norm                    LigerRMSNormFunction   …RMSNorm    on an NPU rounded once, not twice
    rotary          npu_rotary_mul, mode "half"     LigerRopeFunction      …Attention
    swiglu          npu_swiglu                      LigerSiLUMulFunction   …MLP
    grouped_matmul  npu_grouped_matmul, npu_swiglu                         …Experts

Families: Qwen2 and Qwen2.5, Qwen3, Qwen3-MoE, Llama. The forward of single modules is exchanged, never that of a class,
and only if on a handful of numbers, on the device, the operator gives what the module gave, and the same gradient.
Liger's own functions for models exchange classes and functions of transformers, for all models of the process.

Experts of an MoE layer by the grouped matrix product, `npu_grouped_matmul`:

    [S, H] by expert ──grouped──▶ gate, up [S, 2·I] ──swiglu──▶ [S, I] ──grouped──▶ [S, H] ──weighted, summed──▶ [T, H]

Legend: T tokens, k experts of each, S = T·k, E experts, H hidden size, I size inside an expert. The operator has no
gradient of its own: both gradients are grouped products again, one grouped along the rows and one along the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FunctionType, MethodType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from runner.core.tolerance import tolerance_of
from runner.interfaces import Decide

GroupedMatmul = Callable[..., Sequence[Tensor]]  # as torch_npu.npu_grouped_matmul
ROWS, SUM = 0, 2  # the axis that is grouped: m, or k of [m, k] x [k, n]


class _GroupedMatmulFunction(torch.autograd.Function):
    """x [S, K] times weight [E, K, N] of each row's group → [S, N]; `ends` int64 [E] ends the groups."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, operator: GroupedMatmul) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        ctx.operator = operator
        return _grouped_product(operator, x, weight, ends, ROWS)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight, ends = ctx.saved_tensors
        grad = grads[0].contiguous()
        of_x, of_weight, *_ = ctx.needs_input_grad
        return (
            _grouped_product(ctx.operator, grad, weight.transpose(1, 2), ends, ROWS) if of_x else None,
            _grouped_product(ctx.operator, x.t(), grad, ends, SUM) if of_weight else None,
            None,
            None,
        )


def _grouped_product(operator: GroupedMatmul, x: Tensor, weight: Tensor, ends: Tensor, axis: int) -> Tensor:
    # split_item 3: one tensor comes back; group_list_type 0: the list is cumulative
    return operator([x], [weight], group_list=ends, split_item=3, group_type=axis, group_list_type=0)[0]


def grouped_experts_forward(
    experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor, operators: Operators
) -> Tensor:
    """Σ over the chosen experts of weight · expert(hidden), [T, H].

    hidden [T, H]; chosen int64 [T, k]; weights [T, k]. `experts` holds gate_up_proj [E, 2·I, H], the gates first, and
    down_proj [E, H, I]. Nothing waits for the device.
    """
    tokens, choices = chosen.shape
    dtype: torch.dtype = experts.down_proj.dtype
    of_expert, order = torch.sort(chosen.flatten(), stable=True)
    every = torch.arange(experts.num_experts, device=hidden.device)
    ends = torch.searchsorted(of_expert, every, right=True)
    # repeated and then permuted, so that the gradient of the permutation adds nothing up in an order of its own
    rows = hidden.to(dtype)[:, None].expand(-1, choices, -1).flatten(0, 1).index_select(0, order)
    inner = operators.npu_swiglu(_grouped_linear(rows, experts.gate_up_proj, ends, dtype, operators), dim=-1)
    out = _grouped_linear(inner, experts.down_proj, ends, dtype, operators)
    out = out * weights.flatten().index_select(0, order)[:, None]
    return out.index_select(0, torch.argsort(order)).unflatten(0, (tokens, choices)).sum(1).to(hidden.dtype)


def _grouped_linear(x: Tensor, weight: Any, ends: Tensor, dtype: torch.dtype, operators: Operators) -> Tensor:
    weight = weight.to(dtype).transpose(1, 2)
    return _GroupedMatmulFunction.apply(x, weight, ends, operators.npu_grouped_matmul)


FAMILIES = ("qwen2", "qwen3", "qwen3_moe", "llama")
ROTARY = "apply_rotary_pos_emb"  # what the attention of every family calls


class Operators(Protocol):
    """The part of torch_npu that is used here."""

    def npu_rms_norm(self, x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]: ...

    def npu_rotary_mul(self, x: Tensor, cos: Tensor, sin: Tensor, rotary_mode: str) -> Tensor: ...

    def npu_swiglu(self, x: Tensor, dim: int) -> Tensor: ...

    def npu_grouped_matmul(self, x: Sequence[Tensor], weight: Sequence[Tensor], **options: Any) -> Sequence[Tensor]: ...


class FusedTrial(NamedTuple):
    """A module's output on a few numbers, the fused output, and the tensors whose gradients are compared."""

    own: Tensor
    fused: Tensor
    given: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class FusedModule:
    """A kind of module: the end of its class name, its fused forward, and a function that tries it.

    objection: why a module is not of the kind that `forward` computes, or None.
    """

    ending: str
    objection: Callable[[Any], str | None]
    forward: Callable[[Any, Any], Callable[..., Any]]
    trial: Callable[[Any, Any], FusedTrial]


def install_fused_ops(module: nn.Module, wanted: Sequence[str], operators: Operators, decide: Decide) -> None:
    """Replace the forward of every module that a wanted operator fits; prints each kind and its count.

    Experts that are left run one after the other: what transformers prefers is a grouped product that torch_npu lacks.
    """
    _replace_forwards(module, {name: FUSED_MODULES[name] for name in wanted}, operators, "device.fused_ops", decide)
    left = [m for m in module.modules() if hasattr(m, "_is_expert_parallel") and "forward" not in vars(m)]
    if left:
        module.set_experts_implementation("eager")  # type: ignore[operator]
        decide.record_fact("experts", "one after the other", "torch_npu 2.13 has no grouped product under torch's name")


def install_liger_kernels(module: nn.Module, operators: Any, decide: Decide) -> None:
    """Replace the forward of norms, attention and dense MLPs; operators: liger_kernel.ops."""
    _replace_forwards(module, LIGER_MODULES, operators, "model.kernels", decide)


def _replace_forwards(
    module: nn.Module, wanted: Mapping[str, FusedModule], operators: Any, option: str, decide: Decide
) -> None:
    config: Any = module.config
    if not wanted:
        return
    if config.model_type not in FAMILIES:
        decide(option, ", ".join(wanted), "none", f"{config.model_type} is none of {', '.join(FAMILIES)}")
        return
    home = f"transformers.models.{config.model_type}.modeling_{config.model_type}"
    for name, kind in wanted.items():
        parts = [m for m in module.modules() if type(m).__module__ == home and type(m).__name__.endswith(kind.ending)]
        if not parts:
            continue
        if reason := _objection(kind, parts[0], operators):
            decide(f"{option}.{name}", "fused", "transformers' own", reason)
            continue
        forward = kind.forward(parts[0], operators)
        for part in parts:
            part.forward = MethodType(forward, part)
        text = f"{type(parts[0]).__name__} and similar modules"
        decide.record_fact(f"{option}.{name}", f"{len(parts)} modules", text)


@torch.enable_grad()
def _objection(kind: FusedModule, part: Any, operators: Any) -> str | None:
    """Why not: the module is of another kind, the operator is not there, or it gives something else."""
    if reason := kind.objection(part):
        return reason
    if next(part.parameters()).device.type == "meta":  # where nothing is computed, nothing can be tried
        return None
    try:
        own, fused, given = kind.trial(part, kind.forward(part, operators))
        if not _is_close(own.detach(), fused.detach()):
            return "the operator's output differs from the module's"
        trainable = [tensor for tensor in given if tensor.requires_grad]
        ramp = torch.linspace(-1, 1, own.numel(), device=own.device, dtype=own.dtype).view_as(own)
        gradients = [torch.autograd.grad(out, trainable, ramp) for out in (own, fused)]
    except (AttributeError, RuntimeError, TypeError) as error:
        return f"the operator fails: {str(error).strip().splitlines()[0]}"
    if all(_is_close(mine, theirs) for mine, theirs in zip(*gradients, strict=True)):
        return None
    return "the operator's gradient differs from the module's"


def _is_close(own: Tensor, fused: Tensor) -> bool:
    limit = tolerance_of(str(own.dtype).removeprefix("torch.")).values * float(own.abs().max())
    return own.dtype == fused.dtype and own.shape == fused.shape and float((own - fused).abs().max()) <= limit


def _random_tensor(like: Tensor, *shape: int) -> Tensor:
    """Random numbers from a stream of their own, of the type and on the device of `like`."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(like.device, like.dtype)


def _norm_forward(norm: Callable[[Tensor, Tensor, float], Tensor]) -> Callable[..., Any]:
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        weight = self.weight
        wide = torch.promote_types(hidden_states.dtype, weight.dtype)  # the operator needs one type
        return norm(hidden_states.to(wide), weight.to(wide), self.variance_epsilon)

    return forward


def _norm_objection(part: Any) -> str | None:
    return None if hasattr(part, "variance_epsilon") else "it does not expose its epsilon"


def _norm_trial(part: Any, forward: Callable[..., Any]) -> FusedTrial:
    x = (_random_tensor(part.weight, 3, len(part.weight)) * 3).requires_grad_()
    return FusedTrial(part(x), forward(part, x), (x, part._parameters["weight"]))


def _swiglu_forward(product: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.down_proj(product(self.gate_proj(x), self.up_proj(x)))

    return forward


def _silu_objection(part: Any) -> str | None:
    x = torch.linspace(-4, 4, 9)
    is_silu = torch.allclose(part.act_fn(x), torch.nn.functional.silu(x))
    return None if is_silu else f"its activation is {type(part.act_fn).__name__}, not SiLU"


def _mlp_trial(part: Any, forward: Callable[..., Any]) -> FusedTrial:
    x = _random_tensor(part.gate_proj.weight, 3, part.gate_proj.in_features).requires_grad_()
    return FusedTrial(part(x), forward(part, x), (x,))


def _npu_rotary(operators: Operators) -> Callable[..., tuple[Tensor, Tensor]]:
    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(q.dtype, cos.dtype)
        cos, sin = (x.unsqueeze(unsqueeze_dim).to(wide) for x in (cos, sin))
        first, second = (operators.npu_rotary_mul(x.to(wide), cos, sin, "half") for x in (q, k))
        return first, second

    return apply


def _attention_forward(part: Any, rotary: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Any]:
    """The module's own forward, in which one name stands for another function."""
    own = type(part).forward
    names = {**own.__globals__, ROTARY: rotary}
    bound = FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
    bound.__kwdefaults__ = own.__kwdefaults__
    return bound


def _attention_objection(part: Any) -> str | None:
    own = type(part).forward
    calls = isinstance(own, FunctionType) and ROTARY in own.__code__.co_names and ROTARY in own.__globals__
    return None if calls else f"it does not call {ROTARY}"


def _rotary_trial(part: Any, forward: Any) -> FusedTrial:
    weight = part.q_proj.weight
    q, k = (_random_tensor(weight, 1, heads, 3, part.head_dim).requires_grad_() for heads in (4, 2))
    angles = torch.arange(3.0)[:, None] + torch.arange(float(part.head_dim // 2))
    cos, sin = (torch.cat([x, x], -1)[None].to(weight) for x in (angles.cos(), angles.sin()))
    own = type(part).forward.__globals__[ROTARY](q, k, cos, sin)
    fused = forward.__globals__[ROTARY](q, k, cos, sin)
    return FusedTrial(torch.cat(own, 1), torch.cat(fused, 1), (q, k))


def _experts_forward(part: Any, operators: Operators) -> Callable[..., Any]:
    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return grouped_experts_forward(self, hidden_states, top_k_index, top_k_weights, operators)

    return forward


def _experts_objection(part: Any) -> str | None:
    usual = (part.num_experts, 2 * part.intermediate_dim, part.hidden_dim)
    if tuple(part.gate_up_proj.shape) != usual or getattr(part, "has_bias", False):
        return "its experts' weights have another layout"
    return _silu_objection(part)


def _experts_trial(part: Any, forward: Callable[..., Any]) -> FusedTrial:
    x = _random_tensor(part.down_proj, 5, part.hidden_dim).requires_grad_()
    scores = _random_tensor(part.down_proj, 5, part.num_experts).float().softmax(-1)
    weights, chosen = scores.topk(min(2, part.num_experts), -1)
    given = (x, chosen, weights.to(x.dtype))
    plain = getattr(type(part).forward, "__wrapped__", type(part).forward)  # what transformers would choose may not run
    own, fused = plain(part, *given), forward(part, *given)
    return FusedTrial(own, fused, (x, part.down_proj))  # of the two weights the smaller one


FUSED_MODULES = {
    "rms_norm": FusedModule(
        "RMSNorm", _norm_objection, lambda _, of: _norm_forward(lambda *x: of.npu_rms_norm(*x)[0]), _norm_trial
    ),
    "rotary": FusedModule(
        "Attention", _attention_objection, lambda part, of: _attention_forward(part, _npu_rotary(of)), _rotary_trial
    ),
    "swiglu": FusedModule(
        "MLP",
        _silu_objection,
        lambda _, of: _swiglu_forward(lambda *x: of.npu_swiglu(torch.cat(x, -1), dim=-1)),
        _mlp_trial,
    ),
    "grouped_matmul": FusedModule("Experts", _experts_objection, _experts_forward, _experts_trial),
}


def _liger_rotary(operators: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        first, second = operators.LigerRopeFunction.apply(q, k, cos, sin, None, unsqueeze_dim)
        return first, second

    return apply


def _liger_norm(operators: Any) -> Callable[..., Any]:
    # weights shifted by 0, rounded as in Llama, and its gradient not written over the one it gets
    return _norm_forward(lambda *given: operators.LigerRMSNormFunction.apply(*given, 0.0, "llama", False))


LIGER_MODULES = {
    name: replace(FUSED_MODULES[name], forward=forward)
    for name, forward in {
        "rms_norm": lambda _, of: _liger_norm(of),
        "rotary": lambda part, of: _attention_forward(part, _liger_rotary(of)),
        "swiglu": lambda _, of: _swiglu_forward(of.LigerSiLUMulFunction.apply),
    }.items()
}
