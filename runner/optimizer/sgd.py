"""Stochastic gradient descent from torch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from runner.optimizer.config import SgdConfig
from runner.optimizer.groups import decay_groups
from runner.protocols import Decide


def build(config: SgdConfig, *, parameters: Mapping[str, nn.Parameter], decide: Decide) -> torch.optim.Optimizer:
    """The optimizer over `parameters` (name → parameter)."""
    groups = decay_groups(parameters, config.weight_decay)
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
