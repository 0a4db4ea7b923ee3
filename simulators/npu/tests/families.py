"""Run in a process of its own: models with fused operators and fused attention on the simulated card, next to plain
ones on the CPU; prints the gaps as JSON."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from npu_simulator.config import NpuSimConfig

CONFIG = NpuSimConfig(memory_gib=1.0)
CONFIG.enter()

import torch  # noqa: E402

from npu_simulator.device import NpuSim  # noqa: E402
from runner.core.auto_choices import Decisions  # noqa: E402
from runner.core.prefix_tree import pack_trees  # noqa: E402
from runner.model import padded_attention  # noqa: E402
from runner.model.capability_probe import dense_objection  # noqa: E402
from runner.model.causal_lm import CausalLM  # noqa: E402
from runner.model.config import TinyConfig  # noqa: E402
from runner.model.tiny import byte_tokenizer  # noqa: E402
from tests.device.cases import FAMILIES, family, trees  # noqa: E402

DEVICE = NpuSim(CONFIG, decide=Decisions())
DEVICE.prepare()
PLAIN = NpuSim(CONFIG.model_copy(update={"fused": ()}), decide=Decisions())
PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3], [5], [8, 9, 7, 9, 3]]


def outcome(model: CausalLM, share: bool) -> dict[str, torch.Tensor]:
    """Log-probabilities, and the gradients of their weighted sum, on the CPU."""
    data = pack_trees(trees(), share=share)
    model.module.zero_grad()
    total, outputs = model.linear_loss(
        data.to(model.device), data.tokens["weight"] * torch.linspace(-1, 1, data.num_tokens)
    )
    total.backward()
    gradients = {name: p.grad.cpu() for name, p in model.trainable().items() if p.grad is not None}
    return {"logprobs": outputs["logprobs"].cpu(), **gradients}


def gap(kind: str, share: bool, fused: bool = True, **how: Any) -> Any:
    """The largest difference, relative to the largest number of its tensor, and what was said on the way."""
    said = Decisions()
    DEVICE._decide = PLAIN._decide = said
    models = []
    for device in ("cpu", "npu"):
        module = family(kind).to(device)
        if device == "npu":
            (DEVICE if fused else PLAIN).apply_fused_ops(module)
            pad_batch = DEVICE.dense_attention()
            assert pad_batch is not None
            padded_attention.install_dense_attention(module, pad_batch, said)
        models.append(CausalLM(module, byte_tokenizer(512), TinyConfig(**how), seed=0, decide=said))
    if not models[1].is_padded:
        kernel = DEVICE.varlen_attention(models[1].compute_dtype)
        assert kernel is not None
        models[1].set_varlen_kernel(kernel, decide=said)
    plain, on_card = (outcome(model, share) for model in models)
    assert plain.keys() == on_card.keys()
    gaps = [float((plain[k] - on_card[k]).abs().max() / plain[k].abs().max().clamp_min(1e-3)) for k in plain]
    written, there = (model.generate(PROMPTS, 6, rows=2) for model in models)
    return {"gap": max(gaps), "facts": [str(d) for d in said.entries], "answers": written == there}


def kernels() -> dict[str, str | None]:
    """The kernel for rows side by side against the definition, with one query that sees nothing: what is wrong."""
    kernel, found = DEVICE.dense_attention(), {}
    assert kernel is not None
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for heads, kv_heads in ((4, 4), (4, 2), (6, 1)):
            config = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=16)
            found[f"{dtype} {heads} {kv_heads}"] = dense_objection(kernel, config, dtype, DEVICE.torch_device)
    return found


if __name__ == "__main__":
    found = {f"{kind} {share}": gap(kind, share) for kind in FAMILIES for share in (True, False)}
    found["qwen2 bfloat16"] = gap("qwen2", True, dtype="bfloat16")
    found["qwen3_moe checkpointing"] = gap("qwen3_moe", True, gradient_checkpointing=True)
    found["unfused qwen3_moe"] = gap("qwen3_moe", True, fused=False)
    found["padded llama"] = gap("llama", True, layout="padded")
    print(json.dumps({"models": found, "kernels": kernels()}))
