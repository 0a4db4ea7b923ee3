"""Muon from torch for the matrices inside of layers (Jordan et al., 2024; Liu et al., 2502.16982), AdamW for the rest.

matrices of layers, adapters        orthogonalised momentum, one copy of what is trained
embedding, heads, vectors, experts  AdamW, two copies
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from runner.optimizer.adamw import FUSED_DEVICES
from runner.optimizer.config import MuonConfig
from runner.optimizer.groups import decay_groups
from runner.protocols import Decide

ENDS = ("embed", "lm_head", "wte", "wpe", "score", "value_head")  # in names of what is no matrix inside of a layer


def build(config: MuonConfig, *, parameters: Mapping[str, nn.Parameter], decide: Decide) -> torch.optim.Optimizer:
    """The optimizer over `parameters` (name → parameter). Raises EnvironmentProblem for a torch without Muon."""
    config.preflight()
    matrices = {name: p for name, p in parameters.items() if p.ndim == 2 and not any(end in name for end in ENDS)}
    others = {name: p for name, p in parameters.items() if name not in matrices}
    decide.state("optimizer", f"Muon for {len(matrices)} matrices", f"AdamW for {len(others)} other parameters")
    parts: list[torch.optim.Optimizer] = []
    if matrices:
        options: dict[str, Any] = {"momentum": config.momentum, "adjust_lr_fn": config.adjust_lr_fn}
        parts.append(torch.optim.Muon(decay_groups(matrices, config.weight_decay), lr=config.lr, **options))
    if others:
        groups = decay_groups(others, config.weight_decay)
        # unfused, a step on a card takes temporaries of all of them, which run plan does not count
        fused = {p.device.type for p in others.values() if not p.is_meta} <= FUSED_DEVICES or None
        parts.append(torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused))
    return CombinedOptimizer(parts)


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers as one: their groups one after the other, one state."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        self._parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Let the parts step with this optimizer's groups and state."""
        first = 0
        for part in self._parts:
            part.param_groups = self.param_groups[first : first + len(part.param_groups)]
            part.state = self.state
            first += len(part.param_groups)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Let each part make its step."""
        for part in self._parts:
            part.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As of any optimizer."""
        super().load_state_dict(state_dict)
        self._share()
