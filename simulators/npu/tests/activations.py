"""Run in a process of its own: one forward and backward pass on the simulated card for each way of keeping activations;
prints the most memory that the pass took beside weights and gradients, and whether its gradients are the plain ones.

python simulators/npu/tests/activations.py [TOKENS HIDDEN LAYERS]
"""

from __future__ import annotations

import gc
import json
import sys
from typing import Any

from npu_simulator.config import NpuSimConfig

CONFIG = NpuSimConfig(memory_gib=4.0)
CONFIG.enter()

import torch  # noqa: E402

from npu_simulator.device import NpuSim  # noqa: E402
from runner.core.auto_choices import Decisions  # noqa: E402
from runner.core.batch import pack  # noqa: E402
from runner.model.config import TinyConfig  # noqa: E402
from runner.model.tiny import build, tokenizer  # noqa: E402

TOKENS, HIDDEN, LAYERS = (int(word) for word in sys.argv[1:] or ("512", "64", "8"))
ROW = 128
WAYS: dict[str, dict[str, Any]] = {
    "none": {},
    "every second": {"gradient_checkpointing": 2},
    "selective": {"gradient_checkpointing": "selective"},
    "full": {"gradient_checkpointing": True},
    "full, offloaded": {"gradient_checkpointing": True, "activation_offloading": True},
    "every second, offloaded": {"gradient_checkpointing": 2, "activation_offloading": True},
}
DEVICE = NpuSim(CONFIG, decide=Decisions())
DEVICE.prepare()


def made(how: dict[str, Any]) -> Any:
    config = TinyConfig(hidden_size=HIDDEN, intermediate_size=3 * HIDDEN, layers=LAYERS, **how)
    given: dict[str, Any] = {
        "head": "lm",
        "init_from": None,
        "longest": ROW,
        "fit": DEVICE.apply_fused_ops,
        "admit": None,
    }
    device, said = DEVICE.torch_device, Decisions()
    model: Any = build(config, tokenizer=tokenizer(config), device=device, seed=0, decide=said, **given)
    kernel = DEVICE.varlen_attention(model.compute_dtype)
    assert kernel is not None
    model.set_varlen_kernel(kernel, decide=said)
    return model


def taken(how: dict[str, Any]) -> tuple[int, dict[str, torch.Tensor]]:
    """Bytes, and gradients on the CPU."""
    model = made(how)
    stream = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 256, (ROW,), generator=stream).tolist() for _ in range(TOKENS // ROW)]
    data = pack(rows, [[1.0] * ROW for _ in rows])
    weights = data.tokens["weight"].masked_fill(data.tokens["parent"] < 0, 0.0)
    for parameter in model.trainable().values():
        parameter.grad = torch.zeros_like(parameter)  # there from the start, and so not part of what the pass takes
    batch = data.to(model.device)
    gc.collect()  # the model before this one
    torch.npu.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    model.linear_loss(batch, weights)[0].backward()
    peak = torch.accelerator.max_memory_allocated() - before
    return peak, {name: p.grad.cpu() for name, p in model.trainable().items()}


if __name__ == "__main__":
    plain = taken(WAYS["none"])[1]
    found = {}
    for name, how in WAYS.items():
        peak, gradients = taken(how)
        same = all(torch.equal(gradients[key], plain[key]) for key in plain)
        found[name] = {"bytes": peak, "same": same}
    print(json.dumps(found))
