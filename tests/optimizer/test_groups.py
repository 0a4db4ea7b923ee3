"""Weight decay groups and factories."""

from __future__ import annotations

import torch
from torch import nn

from runner.optimizer import optimizers
from runner.optimizer.config import AdamWConfig, SgdConfig


def no_decision(*args: str) -> None:
    raise AssertionError(args)


def test_only_matrices_are_decayed() -> None:
    named = dict(nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)).named_parameters())
    optimizer = optimizers.build_adamw(AdamWConfig(lr=0.1, weight_decay=0.5), parameters=named, decide=no_decision)
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    before = {n: p.detach().clone() for n, p in named.items()}
    optimizer.step()
    for name, parameter in named.items():
        expected = before[name] * (1 - 0.1 * 0.5) if parameter.ndim == 2 else before[name]
        torch.testing.assert_close(parameter.detach(), expected)


def test_sgd_is_the_formula() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = optimizers.build_sgd(SgdConfig(lr=0.1), parameters={"w": weight}, decide=no_decision)
    weight.grad = torch.full((2, 2), 2.0)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full((2, 2), 0.8))
