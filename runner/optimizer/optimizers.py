"""Which parameters are decayed.

AdamW from torch, fused where the device has the kernel.

On an NPU it is torch's interface to the kernel, and not torch_npu's NpuFusedAdamW: that one lays all gradients in one
tensor, which it fills with zeros instead of giving it back, and replaces the state that a checkpoint reads.

Stochastic gradient descent from torch.

Muon from torch for the matrices inside of layers (Jordan et al., 2024; Liu et al., 2502.16982), AdamW for the rest.

matrices of layers, adapters        orthogonalised momentum, one copy of what is trained
embedding, heads, vectors, experts  AdamW, two copies
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from runner.interfaces import Decide
from runner.optimizer.config import AdamWConfig, MuonConfig, SgdConfig


def decay_groups(parameters: Mapping[str, nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Matrices (and higher) are decayed, vectors (biases, norms) are not; the order of names is kept.

    Parameters on `meta`, which other ranks have, are left out; the groups are as many as if they were there.
    """
    matrices = [p for p in parameters.values() if p.ndim >= 2]
    vectors = [p for p in parameters.values() if p.ndim < 2]
    groups = [(group, decay) for group, decay in ((matrices, weight_decay), (vectors, 0.0)) if group]
    return [{"params": [p for p in group if not p.is_meta], "weight_decay": decay} for group, decay in groups]


FUSED_DEVICES = frozenset({"cpu", "cuda", "npu"})


def build_adamw(
    config: AdamWConfig, *, parameters: Mapping[str, nn.Parameter], decide: Decide
) -> torch.optim.Optimizer:
    """The optimizer over `parameters` (name → parameter)."""
    kinds = {p.device.type for p in parameters.values() if not p.is_meta}
    fused = config.fused and kinds <= FUSED_DEVICES
    if config.fused and not fused:
        decide("optimizer", "fused AdamW", "foreach AdamW", f"torch has no fused kernel for {', '.join(sorted(kinds))}")
    if fused and "npu" in kinds:
        decide.state("optimizer", "fused AdamW", "torch's own interface to the kernel, which keeps gradients apart")
    groups = decay_groups(parameters, config.weight_decay)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused or None)


def build_sgd(config: SgdConfig, *, parameters: Mapping[str, nn.Parameter], decide: Decide) -> torch.optim.Optimizer:
    """The optimizer over `parameters` (name → parameter)."""
    groups = decay_groups(parameters, config.weight_decay)
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)


ENDS = ("embed", "lm_head", "wte", "wpe", "score", "value_head")  # in names of what is no matrix inside of a layer


def build_muon(config: MuonConfig, *, parameters: Mapping[str, nn.Parameter], decide: Decide) -> torch.optim.Optimizer:
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
