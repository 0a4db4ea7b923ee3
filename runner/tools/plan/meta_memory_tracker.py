"""Measure how much memory a pass takes, by running it on tensors without data.

Every operation of the real model runs on torch's `meta` device, which knows shapes and data types and computes nothing.
Each storage is counted until it is freed, rounded up as caching allocators do. Fused operators of the NPU are replaced
by their output shapes and by what torch_npu's autograd formulas keep for the backward pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, UntypedStorage, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from runner.core import torch_compat


class _KeepInputs(torch.autograd.Function):
    """Returns an empty output; keeps inputs, `more` float32 numbers and, if asked, the output."""

    @staticmethod
    def forward(ctx: Any, shape: Sequence[int], more: int, keeps_output: bool, *inputs: Tensor) -> Tensor:
        out = inputs[0].new_empty(shape)
        ctx.save_for_backward(*inputs, inputs[0].new_empty(more, dtype=torch.float32), *[out] * keeps_output)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needed = zip(ctx.saved_tensors, ctx.needs_input_grad[3:], strict=False)
        return (None, None, None, *(torch.empty_like(one) if wanted else None for one, wanted in needed))


_kept: Callable[..., Tensor] = _KeepInputs.apply


class MetaOperators:
    """The part of torch_npu that `device.fused_modules` uses."""

    def npu_rms_norm(self, x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        """Keeps x, gamma and a float32 per row."""
        rows = x.shape[:-1].numel()
        return _kept(x.shape, rows, False, x, gamma), x.new_empty(rows)

    def npu_rotary_mul(self, x: Tensor, cos: Tensor, sin: Tensor, rotary_mode: str) -> Tensor:
        """Keeps all of its inputs."""
        return _kept(x.shape, 0, False, x, cos, sin)

    def npu_swiglu(self, x: Tensor, dim: int) -> Tensor:
        """Keeps gate and up, side by side."""
        return _kept((*x.shape[:-1], x.shape[-1] // 2), 0, False, x)

    def npu_grouped_matmul(self, x: Sequence[Tensor], weight: Sequence[Tensor], **options: Any) -> Sequence[Tensor]:
        """[S, K] times [E, K, N] → [S, N], or, grouped along the sum, [K, S] times [S, N] → [E, K, N]."""
        return [grouped_product(x[0], weight[0], options["group_list"])]


def grouped_product(left: Tensor, right: Tensor, offs: Tensor, *_: Any) -> Tensor:
    """[S, K] times [E, K, N] → [S, N], or, grouped along the sum, [K, S] times [S, N] → [E, K, N].

    torch's own supports only bfloat16 on the meta device.
    """
    if right.ndim == 3:
        return left.new_empty(left.shape[0], right.shape[2])
    return left.new_empty(len(offs), left.shape[0], right.shape[1])


MEANINGS: dict[Any, Callable[..., Tensor]] = dict.fromkeys(torch_compat.aten_operators("_grouped_mm"), grouped_product)


def fused_attention(query: Tensor, key: Tensor, value: Tensor, *, dtype: torch.dtype, **_: Any) -> Tensor:
    """A `VarlenAttention` in `dtype`; keeps inputs, output, and a float32 per query and head."""
    shape = (*query.shape[:2], value.shape[-1])
    return _kept(shape, query.shape[:2].numel(), True, query.to(dtype), key.to(dtype), value.to(dtype))


BLOCK = 512  # bytes: the granularity of the allocators of CUDA and NPU
META = torch.device("meta")
Kind = Literal["activations", "logits", "gradients"]


def round_to_block(num_bytes: int) -> int:
    """The bytes that an allocator gives for so many."""
    return -(-num_bytes // BLOCK) * BLOCK


class MetaMemoryTracker(TorchDispatchMode):
    """Counts the bytes alive on the meta device while it is entered, without what was there `before`.

    peaks: the most there ever was in each moment of a pass, by kind: "logits" for what is as wide as the vocabulary,
    "gradients", "activations"
    """

    def __init__(self, before: Iterable[Tensor], vocabulary: int) -> None:
        super().__init__()
        self._known: weakref.WeakKeyDictionary[UntypedStorage, None] = weakref.WeakKeyDictionary()
        for tensor in before:
            self._known[tensor.untyped_storage()] = None
        self._vocabulary = vocabulary
        self._live: dict[Kind, int] = {"activations": 0, "logits": 0, "gradients": 0}
        self.peaks: dict[str, dict[Kind, int]] = {}
        self.enter("start")

    def enter(self, moment: str) -> None:
        """A moment begins, or continues; each has a peak of its own."""
        self._moment = moment
        self.peaks.setdefault(moment, dict(self._live))
        self.add(0, "activations")

    @property
    def now(self) -> int:
        """Bytes alive."""
        return sum(self._live.values())

    def add(self, num_bytes: int, kind: Kind) -> None:
        """Count something that lives on, or, below 0, that has gone."""
        self._live[kind] += num_bytes
        if sum(self._live.values()) > sum(self.peaks[self._moment].values()):
            self.peaks[self._moment] = dict(self._live)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = MEANINGS.get(function, function)(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.device == META:
                self._note(leaf)
        return out

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._known:
            return
        self._known[storage] = None
        taken = round_to_block(storage.nbytes())
        wide = tensor.ndim > 1 and tensor.shape[-1] == self._vocabulary
        kind: Kind = "logits" if wide else "activations"
        self.add(taken, kind)
        weakref.finalize(storage, self.add, -taken, kind)


def keep_gradients(
    parameters: Iterable[nn.Parameter], tracker: MetaMemoryTracker, parts: int, size: int
) -> list[RemovableHandle]:
    """Count each parameter's gradient as this rank's shard, one of `parts`, with `size` bytes a number.

    The whole gradient is released, as by sharding.
    """

    def count_gradient(parameter: Tensor) -> None:
        assert parameter.grad is not None
        whole = parameter.grad.numel() * size
        parameter.grad = None
        tracker.add(round_to_block(-(-whole // parts)), "gradients")

    return [parameter.register_post_accumulate_grad_hook(count_gradient) for parameter in parameters]
