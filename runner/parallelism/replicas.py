"""Copies of a model on several ranks: that they begin alike, without which they would drift apart unseen."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from runner.errors import EnvironmentProblem
from runner.protocols import Peers

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of a number


def refuse_different(module: nn.Module, peers: Peers) -> None:
    """Raise EnvironmentProblem, on all ranks, where a weight is not the same on each, as far as the sum of its bits
    tells: exact in any order, so that no thread or vector unit changes it."""
    ranks = peers.gather({name: _bits(parameter) for name, parameter in module.named_parameters()})
    for rank, found in enumerate(ranks):
        if differing := [name for name in {**ranks[0], **found} if ranks[0].get(name) != found.get(name)]:
            raise EnvironmentProblem(
                f"ranks 0 and {rank} begin with different weights: {len(differing)} of {len(found)} tensors, e.g. "
                f"{differing[0]}\n  give all machines the same model folder, versions and kind of device"
            )


def _bits(parameter: Tensor) -> int:
    """The sum, modulo 2^64, of a tensor's bits, eight bytes at a time if it divides so: any other type is summed by way
    of a copy in which each number takes eight."""
    flat = parameter.detach().reshape(-1)
    at_once = 8 // flat.element_size()
    flat = flat.clone() if flat.storage_offset() % at_once else flat  # to where eight bytes begin
    kind = torch.int64 if flat.numel() % at_once == 0 else BITS[flat.element_size()]
    return int(flat.view(kind).sum(dtype=torch.int64))
