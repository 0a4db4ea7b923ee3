"""How much memory a pass takes, found by running it on tensors without data.

Every operation of the real model runs on torch's `meta` device, which knows shapes and data types and computes nothing;
each storage that comes to be is counted until nobody holds it any more, rounded up as caching allocators do.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, UntypedStorage, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from runner.plan.operators import MEANINGS

BLOCK = 512  # bytes: the step in which the allocators of CUDA and NPU hand out memory
META = torch.device("meta")
Kind = Literal["activations", "logits", "gradients"]


def rounded(num_bytes: int) -> int:
    """The bytes that an allocator gives for so many."""
    return -(-num_bytes // BLOCK) * BLOCK


class Tracker(TorchDispatchMode):
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
        """A moment begins, or goes on; each has a peak of its own."""
        self._moment = moment
        self.peaks.setdefault(moment, dict(self._live))
        self.add(0, "activations")

    @property
    def peak(self) -> dict[Kind, int]:
        """The most of all moments."""
        return max(self.peaks.values(), key=lambda peak: sum(peak.values()))

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
        taken = rounded(storage.nbytes())
        wide = tensor.ndim > 1 and tensor.shape[-1] == self._vocabulary
        kind: Kind = "logits" if wide else "activations"
        self.add(taken, kind)
        weakref.finalize(storage, self.add, -taken, kind)


def keep_gradients(
    parameters: Iterable[nn.Parameter], tracker: Tracker, parts: int, size: int
) -> list[RemovableHandle]:
    """Count each parameter's gradient, from its making to the end of the pass, as the one part in `parts` that a rank
    keeps of it, with `size` bytes a number; the whole one is let go, as sharding lets it go."""

    def kept(parameter: Tensor) -> None:
        assert parameter.grad is not None
        whole = parameter.grad.numel() * size
        parameter.grad = None
        tracker.add(rounded(-(-whole // parts)), "gradients")

    return [parameter.register_post_accumulate_grad_hook(kept) for parameter in parameters]
