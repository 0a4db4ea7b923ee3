"""AdamW with its moments in 8 bits, by torchao (Dettmers et al., 2110.02861), for the whole of a model on one card.

    bytes of a trained number     weight    gradient    moments
    optimizer=adamw               4         4           8
    optimizer=adamw8bit           4         4           2
      stochastic_rounding=true    2         2           2

Departures from torchao's class: the learning rate is a number; a checkpoint holds codes and scales as plain tensors;
random bits for rounding follow from `seed`, which the learner sets, and the count of steps, so that a resumed run draws
those of one that was not stopped; torch's generators are left as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from runner.core.errors import EnvironmentProblem
from runner.core.rng import derive
from runner.interfaces import Decide
from runner.optimizer.config import AdamW8bitConfig
from runner.optimizer.optimizers import decay_groups

SIGNED = {"exp_avg": True, "exp_avg_sq": False}  # of the moments that torchao may keep in 8 bits
CODES, SCALE = "codes", "scale"
COMPILED = frozenset({"cuda"})  # where torchao's update is compiled; elsewhere its operators run one by one


def build(config: AdamW8bitConfig, *, parameters: Mapping[str, nn.Parameter], decide: Decide) -> torch.optim.Optimizer:
    """The optimizer over `parameters` (name → parameter). Raises EnvironmentProblem where torchao fails on import."""
    kind = _optimizer_class()
    found: torch.optim.Optimizer = kind(
        decay_groups(parameters, config.weight_decay),
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        bf16_stochastic_round=config.stochastic_rounding,
    )
    return found


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
            return nullcontext() if kinds <= COMPILED else torch.compiler.set_stance("force_eager")

        @contextmanager
        def _random_bits(self) -> Iterator[None]:
            """Draw those of this step, where any are, on the device of the parameters."""
            if not self.bf16_stochastic_round:
                yield
                return
            steps = [int(entry["step"]) for entry in self.state.values()]
            seed = derive(self.seed, "stochastic rounding", max(steps, default=0))
            device = self.param_groups[0]["params"][0].device  # of all of them
            cards = [] if device.type == "cpu" else [device]
            with torch.random.fork_rng(cards, device_type=device.type):
                torch.default_generator.manual_seed(seed)
                for card in cards:
                    torch.get_device_module(card).manual_seed(seed)
                yield

        def state_dict(self) -> dict[str, Any]:
            found: dict[str, Any] = super().state_dict()
            return found | {"state": {index: _as_plain(entry) for index, entry in found["state"].items()}}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            state = {index: _as_8bit(entry) for index, entry in state_dict["state"].items()}
            super().load_state_dict({**state_dict, "state": state})

    return PlainAdamW8bit


def _as_plain(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a parameter, with codes and scales in the place of moments in 8 bits."""
    found: dict[str, Any] = {}
    for key, value in entry.items():
        if is_traceable_wrapper_subclass(value):
            found |= {f"{key}.{inner}": getattr(value, inner) for inner in (CODES, SCALE)}
        else:
            found[key] = value
    return found


def _as_8bit(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What `_as_plain` was made of."""
    from torchao.optim.subclass_8bit import OptimState8bit

    found = {key: value for key, value in entry.items() if "." not in key}
    for key, signed in SIGNED.items():
        if (codes := entry.get(f"{key}.{CODES}")) is not None:
            table = OptimState8bit.zeros((1, 256), signed, device=codes.device).qmap
            scale = entry[f"{key}.{SCALE}"].to(codes.device)
            found[key] = OptimState8bit(codes, scale, table, signed, torch.float32)
    return found
