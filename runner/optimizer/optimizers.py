"""The optimizers, and which parameters they decay.

    adamw       torch's, fused where the device has the kernel
    sgd         torch's
    muon        torch's for the matrices inside of layers (Jordan et al., 2024; Liu et al., 2502.16982), else AdamW
                matrices of layers, adapters        orthogonalized momentum, one copy of what is trained
                embedding, heads, vectors, experts  AdamW, two copies
    adamw8bit   AdamW with 8-bit moments, by torchao (Dettmers et al., 2110.02861), for an unsharded model

    bytes per parameter           weight    gradient    moments
    optimizer=adamw               4         4           8
    optimizer=adamw8bit           4         4           2
      stochastic_rounding=true    2         2           2

On an NPU, AdamW is torch's fused kernel, not torch_npu's NpuFusedAdamW: that one puts all gradients into one tensor,
which it zeroes but does not free, and replaces the state that a checkpoint reads.

adamw8bit departs from torchao's class: the learning rate is a number; a checkpoint has codes and scales as plain
tensors; random bits for rounding are derived from `seed`, which the learner sets, and the number of steps, so that a
resumed run uses the same bits; torch's generators are not changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from runner.core.device_kinds import find_kind
from runner.core.errors import EnvironmentProblem
from runner.core.rng import derive_seed
from runner.core.torch_compat import seed_generators
from runner.interfaces import Decide
from runner.optimizer.config import AdamW8bitConfig, AdamWConfig, MuonConfig, SgdConfig

# Vectors of several heads, experts or channels in one tensor: biases (gpt-oss, Zamba), norms (Cohere), and the state
# space parameters that Mamba's authors exclude from weight decay.
STACKED_VECTORS = re.compile(r"bias$|norm[^.]*\.[^.]+$|\b(A_log|D)$")


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether a parameter is a matrix, or several, and no vector (bias, norm) or stack of vectors."""
    return parameter.ndim >= 2 and not STACKED_VECTORS.search(name)


def decay_groups(parameters: Mapping[str, nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups: matrices with weight decay, vectors without.

    Parameters on `meta`, which other ranks have, are omitted; the number of groups does not depend on them.
    """
    matrices = [p for name, p in parameters.items() if is_matrix(name, p)]
    vectors = [p for name, p in parameters.items() if not is_matrix(name, p)]
    groups = [(group, decay) for group, decay in ((matrices, weight_decay), (vectors, 0.0)) if group]
    return [{"params": [p for p in group if not p.is_meta], "weight_decay": decay} for group, decay in groups]


def _has_fused(kinds: Iterable[str]) -> bool:
    return all(find_kind(kind).fused_optimizer for kind in kinds)


def build_adamw(
    config: AdamWConfig, *, parameters: Mapping[str, nn.Parameter], decide: Decide
) -> torch.optim.Optimizer:
    """The optimizer over `parameters` (name → parameter)."""
    kinds = {p.device.type for p in parameters.values() if not p.is_meta}
    fused = config.fused and _has_fused(kinds)
    if config.fused and not fused:
        decide("optimizer", "fused AdamW", "foreach AdamW", f"torch has no fused kernel for {', '.join(sorted(kinds))}")
    return _adamw(config, decay_groups(parameters, config.weight_decay), fused)


def _adamw(config: AdamWConfig | MuonConfig, groups: list[dict[str, Any]], fused: bool) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=fused or None)


def build_sgd(config: SgdConfig, *, parameters: Mapping[str, nn.Parameter], decide: Decide) -> torch.optim.Optimizer:
    """The optimizer over `parameters` (name → parameter)."""
    groups = decay_groups(parameters, config.weight_decay)
    return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.momentum)


ENDS = ("embed", "lm_head", "wte", "wpe", "score", "value_head")  # parts of names of matrices outside of layers


def build_muon(config: MuonConfig, *, parameters: Mapping[str, nn.Parameter], decide: Decide) -> torch.optim.Optimizer:
    """The optimizer over `parameters` (name → parameter). Raises EnvironmentProblem if torch has no Muon."""
    config.preflight()
    matrices = {
        name: p
        for name, p in parameters.items()
        if p.ndim == 2 and is_matrix(name, p) and not any(end in name for end in ENDS)
    }
    others = {name: p for name, p in parameters.items() if name not in matrices}
    decide.record_fact("optimizer", f"Muon for {len(matrices)} matrices", f"AdamW for {len(others)} other parameters")
    parts: list[torch.optim.Optimizer] = []
    if matrices:
        options: dict[str, Any] = {"momentum": config.momentum, "adjust_lr_fn": config.adjust_lr_fn}
        parts.append(torch.optim.Muon(decay_groups(matrices, config.weight_decay), lr=config.learning_rate, **options))
    if others:
        groups = decay_groups(others, config.weight_decay)
        # unfused, a step on a card needs temporary memory that `run plan` does not count
        parts.append(_adamw(config, groups, _has_fused(p.device.type for p in others.values() if not p.is_meta)))
    return CombinedOptimizer(parts)


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers as one, with all their groups and one state."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        self._parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Let the optimizers use this optimizer's groups and state."""
        first = 0
        for part in self._parts:
            part.param_groups = self.param_groups[first : first + len(part.param_groups)]
            part.state = self.state
            first += len(part.param_groups)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make a step of each optimizer."""
        for part in self._parts:
            part.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load groups and state; see torch.optim.Optimizer."""
        super().load_state_dict(state_dict)
        self._share()


SIGNED = {"exp_avg": True, "exp_avg_sq": False}  # 8-bit moments of torchao → whether they are signed
CODES, SCALE = "codes", "scale"


def build_adamw8bit(
    config: AdamW8bitConfig, *, parameters: Mapping[str, nn.Parameter], decide: Decide
) -> torch.optim.Optimizer:
    """The optimizer over `parameters` (name → parameter).

    Raises EnvironmentProblem if torchao cannot be imported.
    """
    kind = _optimizer_class()
    return kind(
        decay_groups(parameters, config.weight_decay),
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.eps,
        bf16_stochastic_round=config.stochastic_rounding,
    )


def _optimizer_class() -> Any:
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        text = f"optimizer=adamw8bit: torchao cannot be imported: {error}"
        raise EnvironmentProblem(f"{text}\n  pip install 'torchao>=0.18', or type optimizer=adamw") from error

    class PlainAdamW8bit(AdamW8bit):
        """torchao's AdamW8bit behind the interface of torch's optimizers."""

        seed: int = 0

        def add_param_group(self, param_group: dict[str, Any]) -> None:
            super().add_param_group(param_group)
            self.param_groups[-1]["lr"] = float(self.param_groups[-1]["lr"])

        def step(self, closure: Callable[[], float] | None = None) -> Any:
            rates = [group["lr"] for group in self.param_groups]
            try:
                for group, rate in zip(self.param_groups, rates, strict=True):
                    group["lr"] = torch.tensor(float(rate), dtype=torch.float32)
                with self._compiling(), self._random_bits():
                    return super().step(closure)
            finally:
                for group, rate in zip(self.param_groups, rates, strict=True):
                    group["lr"] = rate

        def _compiling(self) -> AbstractContextManager[Any]:
            kinds = {p.device.type for group in self.param_groups for p in group["params"]}
            compiled = all(find_kind(kind).compiles_optimizer for kind in kinds)
            return nullcontext() if compiled else torch.compiler.set_stance("force_eager")

        @contextmanager
        def _random_bits(self) -> Iterator[None]:
            """Seed the random bits of this step, if it rounds stochastically."""
            if not self.bf16_stochastic_round:
                yield
                return
            steps = [int(entry["step"]) for entry in self.state.values()]
            seed = derive_seed(self.seed, "stochastic rounding", max(steps, default=0))
            device = self.param_groups[0]["params"][0].device  # of all of them
            with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
                seed_generators(seed, device)
                yield

        def state_dict(self) -> dict[str, Any]:
            found: dict[str, Any] = super().state_dict()
            return found | {"state": {index: _as_plain(entry) for index, entry in found["state"].items()}}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            state = {index: _as_8bit(entry) for index, entry in state_dict["state"].items()}
            super().load_state_dict({**state_dict, "state": state})

    return PlainAdamW8bit


def _as_plain(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's state with codes and scales instead of 8-bit moments."""
    found: dict[str, Any] = {}
    for key, value in entry.items():
        if is_traceable_wrapper_subclass(value):
            found |= {f"{key}.{inner}": getattr(value, inner) for inner in (CODES, SCALE)}
        else:
            found[key] = value
    return found


def _as_8bit(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `_as_plain`."""
    from torchao.optim.subclass_8bit import OptimState8bit

    found = {key: value for key, value in entry.items() if "." not in key}
    for key, signed in SIGNED.items():
        if (codes := entry.get(f"{key}.{CODES}")) is not None:
            table = OptimState8bit.zeros((1, 256), signed, device=codes.device).qmap
            scale = entry[f"{key}.{SCALE}"].to(codes.device)
            found[key] = OptimState8bit(codes, scale, table, signed, torch.float32)
    return found
