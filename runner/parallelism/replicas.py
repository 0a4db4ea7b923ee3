"""Copies of a model on several ranks: that they begin alike, without which they would drift apart unseen."""

from __future__ import annotations

import torch
from torch import nn

from runner.errors import EnvironmentProblem
from runner.protocols import Peers


def refuse_different(module: nn.Module, peers: Peers) -> None:
    """Raise EnvironmentProblem, on all ranks, where a weight's sum is not the same on each."""
    sums = {name: float(parameter.detach().sum(dtype=torch.float32)) for name, parameter in module.named_parameters()}
    ranks = peers.gather(sums)
    for rank, found in enumerate(ranks):
        if differing := [name for name, value in found.items() if value != ranks[0].get(name)]:
            raise EnvironmentProblem(
                f"ranks 0 and {rank} begin with different weights: {len(differing)} of {len(found)} tensors, e.g. "
                f"{differing[0]}\n  give all machines the same model folder, versions and kind of device"
            )
