"""The other fused operators of the NPU as plain arithmetic, from their documentation, on tensors of the host.

Each function takes the arguments of the operator's schema by name, computes in float32, and raises Refused for what the
card does not take. Source: documentation and schemas of torch_npu 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from npu_simulator.strict import need, need_absent, need_floats

Given = Mapping[str, Any]
LARGEST_ROTATED = 896


def rms_norm(given: Given) -> tuple[Tensor, Tensor]:
    """x / rms(x) · gamma over the dimensions of gamma; and 1 / rms(x), float32, with those dimensions of size 1."""
    x, gamma = given["input"], given["gamma"]
    need_floats("npu_rms_norm", input=x, gamma=gamma)
    need(x.shape[x.dim() - gamma.dim() :] == gamma.shape, "npu_rms_norm", "gamma has not the last dimensions of input")
    rstd = (x.float().pow(2).mean(_over(gamma), keepdim=True) + given["epsilon"]).rsqrt()
    return (x.float() * rstd * gamma.float()).to(x.dtype), rstd


def rms_norm_backward(given: Given) -> tuple[Tensor, Tensor]:
    """The gradients of input, in its type, and of gamma, in float32.

    dx = r (g − x̂ mean(g ∘ x̂)) with x̂ = x r and g = dy ∘ gamma; dgamma = Σ dy ∘ x̂
    """
    x, gamma, rstd = given["input"], given["gamma"], given["rstd"]
    dy = given["dy"].float()
    unit = x.float() * rstd
    g = dy * gamma.float()
    dx = rstd * (g - unit * (g * unit).mean(_over(gamma), keepdim=True))
    return dx.to(x.dtype), (dy * unit).sum_to_size(gamma.shape)


def add_rms_norm(given: Given) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of x1 + x2, 1 / rms, and the sum itself."""
    x1, x2 = given["x1"], given["x2"]
    need_floats("npu_add_rms_norm", x1=x1, x2=x2, gamma=given["gamma"])
    total = x1 + x2
    y, rstd = rms_norm({"input": total, "gamma": given["gamma"], "epsilon": given["epsilon"]})
    return y, rstd, total


def _over(gamma: Tensor) -> tuple[int, ...]:
    return tuple(range(-gamma.dim(), 0))


def rotary_mul(given: Given) -> Tensor:
    """input ∘ r1 + rotated(input) ∘ r2; see `_rotated`."""
    x, cos, sin = (given[name] for name in ("input", "r1", "r2"))
    _check_rotary(given)
    rotated = _rotated(x.float(), given["rotary_mode"])
    return (x.float() * cos.float() + rotated * sin.float()).to(x.dtype)


def rotary_mul_backward(given: Given) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of input, r1 and r2. Rotating is skew-symmetric: the gradient rotates the other way."""
    x, cos, sin = (given[name] for name in ("input", "r1", "r2"))
    dy, mode = given["grad"].float(), given["rotary_mode"]
    dx = dy * cos.float() - _rotated(dy * sin.float(), mode)
    dcos = (dy * x.float()).sum_to_size(cos.shape)
    dsin = (dy * _rotated(x.float(), mode)).sum_to_size(sin.shape)
    return dx.to(x.dtype), dcos.to(cos.dtype), dsin.to(sin.dtype)


def _check_rotary(given: Given) -> None:
    name, (x, cos, sin) = "npu_rotary_mul", (given[key] for key in ("input", "r1", "r2"))
    need_absent(name, rotate=given.get("rotate"))
    need_floats(name, input=x, r1=cos, r2=sin)
    need(x.dim() == cos.dim() == sin.dim() == 4, name, "input, r1 and r2 have 4 dimensions")
    size = x.shape[3]
    need(size < LARGEST_ROTATED and size % 2 == 0, name, f"head size {size} is odd or not below {LARGEST_ROTATED}")
    need(cos.shape == sin.shape and cos.shape[3] == size, name, f"r1 {tuple(cos.shape)}, r2 {tuple(sin.shape)}")
    need(given["rotary_mode"] in ("half", "interleave"), name, f"rotary_mode {given['rotary_mode']!r} is unknown")


def _rotated(x: Tensor, mode: str) -> Tensor:
    """half: (a, b) → (−b, a) of the two halves; interleave: of each pair of neighbors."""
    if mode == "half":
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def swiglu(given: Given) -> Tensor:
    """silu(a) ∘ b of the two halves (a, b) of input along dim."""
    gate, up = _halves(given)
    return (F.silu(gate) * up).to(given["input"].dtype)


def swiglu_backward(given: Given) -> Tensor:
    """silu'(a) = σ(a) (1 + a (1 − σ(a)))."""
    gate, up = _halves(given)
    dy, share = given["grad_output"].float(), gate.sigmoid()
    dgate = dy * up * share * (1 + gate * (1 - share))
    return torch.cat((dgate, dy * gate * share), given["dim"]).to(given["input"].dtype)


def _halves(given: Given) -> tuple[Tensor, Tensor]:
    x, dim = given["input"], given["dim"]
    need_floats("npu_swiglu", input=x)
    need(x.shape[dim] % 2 == 0, "npu_swiglu", f"dimension {dim} of input has the odd size {x.shape[dim]}")
    first, second = x.float().chunk(2, dim)
    return first, second


def grouped_matmul(given: Given) -> list[Tensor]:
    """One product for each group, the results in one tensor (split_item 2 or 3). Other forms are refused.

    group_type 0: rows of x [S, K] in groups, times weight [E, K, N] or a list of E, plus bias → [S, N]
    group_type 2: the sum in groups: x [K, S], weight [S, N] → [E, K, N]
    group_list holds the groups' ends (group_list_type 0) or sizes (1).
    """
    name, xs, weights = "npu_grouped_matmul", given["x"], given["weight"]
    known = {"x", "weight", "bias", "group_list", "split_item", "group_type", "group_list_type", "tuning_config"}
    need_absent(name, **{key: value for key, value in given.items() if key not in known and value != 0})
    need(len(xs) == 1 and given["split_item"] in (2, 3), name, "one x and split_item 2 or 3 are simulated")
    need(given["group_type"] in (0, 2, None), name, f"group_type {given['group_type']} is not simulated")
    need_floats(name, x=xs[0], **{f"weight[{index}]": weight for index, weight in enumerate(weights)})
    x, in_sum = xs[0], given["group_type"] == 2
    sizes = _group_sizes(given, x.shape[1] if in_sum else x.shape[0])
    if in_sum:
        pairs = zip(x.split(sizes, 1), weights[0].split(sizes), strict=True)
        return [torch.stack([a.float() @ b.float() for a, b in pairs]).to(x.dtype)]
    groups = weights[0] if weights[0].dim() == 3 else weights
    biases = [0.0] * len(sizes) if not given["bias"] else given["bias"][0] if len(given["bias"]) == 1 else given["bias"]
    need(len(groups) == len(biases) == len(sizes), name, f"{len(sizes)} groups, {len(groups)} weights")
    triples = zip(x.split(sizes), groups, biases, strict=True)
    return [torch.cat([part.float() @ weight.float() + bias for part, weight, bias in triples]).to(x.dtype)]


def _group_sizes(given: Given, rows: int) -> list[int]:
    need(given["group_list"] is not None, "npu_grouped_matmul", "group_list is needed where x is one tensor")
    listed = torch.as_tensor(given["group_list"])
    sizes = listed if given["group_list_type"] == 1 else torch.diff(listed, prepend=listed.new_zeros(1))
    need(bool((sizes >= 0).all()), "npu_grouped_matmul", f"group_list is no list of rising ends: {listed.tolist()[:9]}")
    need(int(sizes.sum()) == rows, "npu_grouped_matmul", f"group_list covers {int(sizes.sum())} of {rows} rows")
    return sizes.tolist()


def apply_adam_w(given: Given) -> tuple[Tensor, Tensor, Tensor]:
    """One AdamW step in place on out = (weights, first moment, second moment); powers are those of the step before."""
    name, grad = "npu_apply_adam_w", given["grad"]
    need(bool(given.get("out")), name, "needs out=(var, m, v)")
    need(not given["amsgrad"], name, "the simulated card does not know amsgrad")
    weights, first, second = given["out"]
    need_floats(name, grad=grad, var=weights, m=first, v=second)
    g = -grad.float() if given["maximize"] else grad.float()
    beta1, beta2, lr = (float(given[key]) for key in ("beta1", "beta2", "lr"))
    m = beta1 * first.float() + (1 - beta1) * g
    v = beta2 * second.float() + (1 - beta2) * g * g
    m_hat = m / (1 - float(given["beta1_power"]) * beta1)
    v_hat = v / (1 - float(given["beta2_power"]) * beta2)
    decayed = weights.float() * (1 - lr * float(given["weight_decay"]))
    weights.copy_(decayed - lr * m_hat / (v_hat.sqrt() + float(given["epsilon"])))
    first.copy_(m)
    second.copy_(v)
    return weights, first, second


def gather_backward(given: Given) -> Tensor:
    """The gradient of gather: each entry goes back to where it was read."""
    need(not given["sparse_grad"], "npu_gather_backward", "sparse gradients are not simulated")
    grad = given["grad"]
    return grad.new_zeros([int(size) for size in given["self_size"]]).scatter_add_(given["dim"], given["index"], grad)


def dtype_cast(given: Given) -> Tensor:
    """Another data type."""
    return _cast(given["input"], given["dtype"])


def dtype_cast_backward(given: Given) -> Tensor:
    """The gradient in the data type of the input."""
    return _cast(given["grad"], given["dtype"])


def _cast(tensor: Tensor, dtype: Any) -> Tensor:
    need(isinstance(dtype, torch.dtype), "npu_dtype_cast", f"{dtype} is no data type of torch")
    return tensor.to(dtype, copy=True)


OPERATORS: Mapping[str, Callable[[Given], Any]] = {
    "npu_rms_norm": rms_norm,
    "npu_rms_norm_backward": rms_norm_backward,
    "npu_add_rms_norm": add_rms_norm,
    "npu_rotary_mul": rotary_mul,
    "npu_rotary_mul_backward": rotary_mul_backward,
    "npu_swiglu": swiglu,
    "npu_swiglu_backward": swiglu_backward,
    "npu_grouped_matmul": grouped_matmul,
    "npu_grouped_matmul.List": grouped_matmul,
    "npu_apply_adam_w.out": apply_adam_w,
    "npu_gather_backward": gather_backward,
    "_npu_dtype_cast": dtype_cast,
    "_npu_dtype_cast_backward": dtype_cast_backward,
}
