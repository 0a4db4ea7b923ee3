"""A frozen weight in 4 or 8 bits that computes as its dequantized numbers.

    weight [O, I] ──quantize──▶ codes, scales ──dequantize, for one product──▶ [O, I] in the compute type

nf4    codes of 4 bits, a float32 scale for each 64 numbers (Dettmers et al., 2305.14314), by bitsandbytes
int8   codes of 8 bits, a float32 scale for each row: its largest magnitude / 127

A linear layer keeps nothing of full size for its backward pass, which dequantizes again. Every other operator gets the
dequantized numbers; one that would write into the weight raises RuntimeError.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # its import warns of kernels that are not used here
Scheme = Literal["nf4", "int8"]
NF4_BLOCK = 64  # numbers that share a scale


class QuantizedWeight(Tensor):
    """A matrix [O, I] as codes and scales; `dtype` is that of its dequantized numbers."""

    codes: Tensor  # nf4: [ceil(O * I / 2), 1] uint8; int8: [O, I] int8
    scales: Tensor  # nf4: [ceil(O * I / 64)] float32; int8: [O, 1] float32
    scheme: Scheme

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor, shape: torch.Size, dtype: torch.dtype, scheme: Scheme) -> Any:
        """See the class."""
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=codes.device)

    def __init__(self, codes: Tensor, scales: Tensor, shape: torch.Size, dtype: torch.dtype, scheme: Scheme) -> None:
        self.codes, self.scales, self.scheme = codes, scales, scheme

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    def dequantize(self) -> Tensor:
        """The numbers, [O, I] in `dtype`."""
        if self.scheme == "int8":
            return (self.codes * self.scales).to(self.dtype)
        if self.is_meta:
            return torch.empty(self.shape, dtype=self.dtype, device=self.device)
        import bitsandbytes  # noqa: F401  # which registers the operator

        found: Tensor = torch.ops.bitsandbytes.dequantize_4bit(
            self.codes, self.scales, NF4_BLOCK, "nf4", list(self.shape), self.dtype
        )
        return found

    def _like(self, codes: Tensor, scales: Tensor) -> Self:
        return type(self)(codes, scales, self.shape, self.dtype, self.scheme)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        made = self._like(self.codes.clone(), self.scales.clone())
        memo[id(self)] = found = nn.Parameter(made, False) if isinstance(self, nn.Parameter) else made
        return found

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return ["codes", "scales"], {"dtype": self.dtype, "scheme": self.scheme}

    @classmethod
    def __tensor_unflatten__(
        cls, parts: Mapping[str, Tensor], own: Mapping[str, Any], size: torch.Size, stride: Any
    ) -> Self:
        return cls(parts["codes"], parts["scales"], size, own["dtype"], own["scheme"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            return _quantized_linear(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        own = args[0] if args and isinstance(args[0], cls) else None
        if own is not None and func is torch.ops.aten.detach.default:
            return own._like(own.codes, own.scales)
        if own is not None and func is torch.ops.aten.clone.default:
            return own._like(own.codes.clone(), own.scales.clone())
        if own is not None and func is torch.ops.aten._to_copy.default and kwargs.get("dtype") in (None, own.dtype):
            device = kwargs.get("device", own.device)
            return own._like(own.codes.to(device), own.scales.to(device))
        if func._schema.is_mutable:
            raise RuntimeError(f"{func} would write into a quantized weight; dequantize it first")
        args, kwargs = torch.utils._pytree.tree_map_only(cls, lambda one: one.dequantize(), (args, kwargs))
        return func(*args, **kwargs)


class _FrozenLinear(torch.autograd.Function):
    """x [..., I] times a quantized weight [O, I], which gets no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: QuantizedWeight) -> Tensor:
        ctx.weight = weight
        return x @ weight.dequantize().to(x.dtype).t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] @ ctx.weight.dequantize().to(grads[0].dtype), None


def _quantized_linear(input: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    out: Tensor = _FrozenLinear.apply(input, weight)  # type: ignore[no-untyped-call]
    return out if bias is None else out + bias


@torch.no_grad()
def quantize_weight(weight: Tensor, scheme: Scheme) -> QuantizedWeight:
    """A matrix [O, I] in codes and scales on its device; `dtype` stays. On `meta` it has shapes alone."""
    numbers, shape, dtype = weight.detach().float().contiguous(), weight.shape, weight.dtype
    if scheme == "int8":
        scales = numbers.abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / 127
        return QuantizedWeight((numbers / scales).round().to(torch.int8), scales, shape, dtype, scheme)
    if weight.is_meta:
        codes = torch.empty((weight.numel() + 1) // 2, 1, dtype=torch.uint8, device="meta")
        scales = torch.empty(-(-weight.numel() // NF4_BLOCK), device="meta")
        return QuantizedWeight(codes, scales, shape, dtype, scheme)
    from bitsandbytes.functional import quantize_4bit

    codes, state = quantize_4bit(numbers, blocksize=NF4_BLOCK, quant_type="nf4")
    return QuantizedWeight(codes, state.absmax, shape, dtype, scheme)
