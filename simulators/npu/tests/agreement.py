"""Run in a process of its own: `run parity` of several jobs between the processor and the simulated card, with right
operators or one that is wrong; prints what each comparison said as JSON.

agreement.py [[WHAT, WORDS], …]: a recording of each job, then its comparison, in which the operator WHAT (right: none)
is spoilt after the trial at the start, which would have found it.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Callable
from typing import Any

from npu_simulator.config import NpuSimConfig

CONFIG = NpuSimConfig(memory_gib=8.0)
CONFIG.enter()

import torch  # noqa: E402
import torch_npu  # noqa: E402
from torch import nn  # noqa: E402

from npu_simulator.device import NpuSim  # noqa: E402
from runner.cli.main import main  # noqa: E402
from runner.device import fused_modules  # noqa: E402
from runner.device.npu import FusionAttention  # noqa: E402

PROBED = 10  # queries of the trial


class Spoilt:
    """torch_npu with one operator exchanged."""

    def __init__(self, name: str, operator: Callable[..., Any]) -> None:
        self._name, self._operator = name, operator

    def __getattr__(self, name: str) -> Any:
        return self._operator if name == self._name else getattr(torch_npu, name)


def rms_norm(x: Any, gamma: Any, epsilon: float) -> Any:
    return torch_npu.npu_rms_norm(x, gamma, 1e-2)


def rotary(x: Any, cos: Any, sin: Any, mode: str) -> Any:
    return torch_npu.npu_rotary_mul(x, cos, sin, "interleave")


def swiglu(x: Any, dim: int) -> Any:
    return torch_npu.npu_swiglu(torch.cat(x.chunk(2, dim)[::-1], dim), dim=dim)


OPERATORS = {
    "rms_norm": Spoilt("npu_rms_norm", rms_norm),
    "rotary": Spoilt("npu_rotary_mul", rotary),
    "swiglu": Spoilt("npu_swiglu", swiglu),
}
ARGUMENTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "scale": lambda o: {"scale": 1.0},
    "polarity": lambda o: {"atten_mask": torch.zeros_like(o["atten_mask"]).logical_not().tril(-1), "sparse_mode": 0},
    "no mask": lambda o: {"atten_mask": None, "sparse_mode": 0},
}


class Wrong(NpuSim):
    """The simulated card, wrong in layer 1 or in its attention."""

    what = "right"

    def apply_fused_ops(self, module: nn.Module, kernels: Any = None) -> None:
        super().apply_fused_ops(module)
        if self.what in OPERATORS:
            endings = {"rms_norm": "post_attention_layernorm", "rotary": "self_attn", "swiglu": "mlp"}
            part = module.get_submodule(f"model.layers.1.{endings[self.what]}")
            part.forward = fused_modules.FUSED_MODULES[self.what].forward(part, OPERATORS[self.what]).__get__(part)

    def varlen_attention(self, dtype: torch.dtype) -> Any:
        change = ARGUMENTS.get(self.what)

        def operator(query: torch.Tensor, *tensors: torch.Tensor, **options: Any) -> Any:
            spoilt = change(options) if change and len(query) != PROBED else {}
            return torch_npu.npu_fusion_attention(query, *tensors, **(options | spoilt))

        return FusionAttention(operator)


def said(*words: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = main(["parity", *words])
    return f"{out.getvalue()}\nexited with {code}"


if __name__ == "__main__":
    NpuSimConfig.factory = f"{__name__}:Wrong"
    found = []
    recorded = ""
    for what, words in json.loads(sys.argv[1]):
        if words != recorded:
            first = said("--record", "recorded.safetensors", "device=cpu", "--steps", "2", *words.split())
            assert first.endswith("exited with 0"), first
            recorded = words
        Wrong.what = what
        compared = ("--compare", "recorded.safetensors", "device=npu_sim", "device.memory_gib=8")
        found.append(said(*compared, "--tolerance", "0.001%"))
    print(json.dumps(found))
