"""Run in a process of its own: tries the simulated card, and prints what it finds as JSON, one entry for each probe."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import sys
from collections.abc import Callable
from typing import Any

from npu_simulator.config import NpuSimConfig

CONFIG = NpuSimConfig(cards=2, deterministic=True, memory_gib=1.0, soc="Ascend910B2")
CONFIG.enter()

import pytest  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from npu_simulator.device import NpuSim  # noqa: E402
from npu_simulator.operators import OPERATORS  # noqa: E402
from runner.core.auto_choices import Decisions  # noqa: E402
from runner.device.base import allocator_stats  # noqa: E402
from runner.tools.doctor import smoke_test  # noqa: E402

DEVICE = NpuSim(CONFIG, decide=Decisions())
DEVICE.prepare()

import torch_npu  # noqa: E402
import transformers  # noqa: E402

FUSED = (*OPERATORS, *(f"npu_fusion_attention{end}" for end in ("", "_grad", "_v3", "_grad_v3")))


def refused(action: Callable[[], Any]) -> str:
    try:
        action()
    except (RuntimeError, torch.OutOfMemoryError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def identity() -> Any:
    return {
        "accelerator": str(torch.accelerator.current_accelerator()),
        "cards": torch.npu.device_count(),
        "name": torch.npu.get_device_name(1),
        "soc": torch_npu.npu.utils.get_soc_version(),
        "memory_bytes": torch.npu.get_device_properties(0).total_memory,
        "found": transformers.utils.is_torch_npu_available(),
        "bf16": torch.npu.is_bf16_supported(),
        "described": DEVICE.describe(),
    }


ON_BOTH: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "product": lambda x: x @ x.T,
    "sum": lambda x: x.sum(0),
    "softmax": lambda x: x.softmax(-1),
    "index": lambda x: x[torch.tensor([2, 0])],
    "index on the card": lambda x: x[torch.tensor([2, 0], device=x.device)],
    "set": lambda x: x.clone().index_put_((torch.tensor([0, 0], device=x.device),), x[:2], accumulate=True),
    "gather": lambda x: x.gather(1, torch.zeros(6, 2, dtype=torch.int64, device=x.device)),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "transposed": lambda x: x.t().contiguous(),
    "view of a view": lambda x: x[1:].t()[::2].reshape(-1),
    "concatenated": lambda x: torch.cat([x, x[:2]]),
    "sorted": lambda x: torch.sort(x, dim=0).values,
    "best": lambda x: torch.topk(x, 2).values,
    "unique": lambda x: (x > 0).to(torch.int64).unique().float(),
    "one of each": lambda x: F.one_hot((x[0] > 0).long()).float(),
    "half": lambda x: (x.bfloat16() @ x.bfloat16().T).float(),
    "as out=": lambda x: torch.add(x, 1.0, out=torch.empty(0, device=x.device)),
    "in place": lambda x: x.clone().mul_(2).masked_fill_(x > 0, 0),
    "foreach": lambda x: torch._foreach_add([x, x], 1.0)[1],
    "norm": lambda x: torch.nn.utils.get_total_norm([x, x]),
    "cumulated": lambda x: x.cumsum(0),
    "cross entropy": lambda x: F.cross_entropy(x, torch.zeros(6, dtype=torch.int64, device=x.device), reduction="none"),
    "embedded": lambda x: F.embedding(torch.tensor([[0, 2]], device=x.device), x),
    "layer norm": lambda x: F.layer_norm(x, (5,)),
    "dropout seeded": lambda x: (torch.manual_seed(3), F.dropout(x, 0.5))[1],
}


def arithmetic() -> Any:
    x = numbers(6, 5)
    return {name: torch.equal(f(x), f(x.npu()).cpu()) for name, f in ON_BOTH.items()}


def gradients() -> Any:
    """The largest difference of values and gradients between card and CPU, of what torch_npu has own formulas for."""
    mask = torch.ones(7, 7, dtype=torch.bool).tril().triu(-3)
    tried = {
        "causal": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "mask": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(q.device)),
        "groups": lambda q, k, v: F.scaled_dot_product_attention(
            q, k[:, :1], v[:, :1], is_causal=True, enable_gqa=True
        ),
        "gather": lambda q, k, v: q.gather(3, torch.zeros(1, 2, 7, 3, dtype=torch.int64, device=q.device)) * k[..., :3],
        "silu": lambda q, k, v: F.silu(q) * k + v.softmax(-1),
    }
    found = {}
    for name, function in tried.items():
        own = [numbers(1, 2, 7, 8, seed=seed).requires_grad_() for seed in range(3)]
        there = [x.detach().npu().requires_grad_() for x in own]
        one, two = function(*own), function(*there)
        weights = numbers(*one.shape, seed=9)
        grads = (
            torch.autograd.grad(one, own, weights, allow_unused=True),
            torch.autograd.grad(two, there, weights.npu(), allow_unused=True),
        )
        pairs = [(one, two), *((a, b) for a, b in zip(*grads, strict=True) if a is not None)]
        found[name] = max(float((a - b.cpu()).detach().abs().max()) for a, b in pairs)
    return found


def flash_attention() -> Any:
    """transformers' own NPU path, whole rows and padded ones (end to end): loss against eager attention on the CPU."""
    config = transformers.Qwen2Config(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    eager = transformers.Qwen2ForCausalLM(config)
    fused = transformers.Qwen2ForCausalLM(copy.deepcopy(config))
    fused.load_state_dict(eager.state_dict())
    fused.set_attn_implementation("flash_attention_2")
    fused = fused.npu()
    ids, mask = torch.randint(50, (2, 9)), torch.ones(2, 9, dtype=torch.int64)
    mask[1, 5:] = 0
    found = {}
    for name, seen in (("whole", torch.ones_like(mask)), ("padded", mask)):
        labels = ids.masked_fill(seen == 0, -100)
        losses = []
        for model, where in ((eager, "cpu"), (fused, "npu")):
            model.zero_grad()
            loss = model(ids.to(where), attention_mask=seen.to(where), labels=labels.to(where)).loss
            loss.backward()
            losses.append((float(loss), model.model.layers[0].self_attn.q_proj.weight.grad.cpu()))
        (one, own), (two, theirs) = losses
        found[name] = [abs(one - two), float((own - theirs).abs().max())]
    return found


def experts() -> Any:
    """A mixture of experts with every fused operator, against transformers' own on the CPU: loss, router's gradient."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
        max_position_embeddings=32, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    own = transformers.Qwen3MoeForCausalLM(config)
    fused = copy.deepcopy(own).npu()
    said = Decisions()
    register = NpuSim(CONFIG, decide=said)
    register.apply_fused_ops(fused)
    ids = torch.randint(50, (2, 9))
    found = []
    for model, where in ((own, "cpu"), (fused, "npu")):
        loss = model(ids.to(where), labels=ids.to(where)).loss
        loss.backward()
        layer = model.model.layers[0].mlp
        found.append((loss.detach().cpu(), layer.gate.weight.grad.cpu(), layer.experts.down_proj.grad.cpu()))
    gaps = [float((a - b).abs().max()) for a, b in zip(*found, strict=True)]
    return {"gaps": gaps, "decided": [f"{d.feature}: {d.got} ({d.reason})" for d in said.entries]}


def strictness() -> Any:
    x, q = torch.ones(4, 4, device="npu"), numbers(4, 2, 8).npu()
    ends = {"actual_seq_qlen": [2, 4], "actual_seq_kvlen": [2, 4]}
    return {
        "sum with the host": refused(lambda: x + torch.ones(4, 4)),
        "product with the host": refused(lambda: x @ torch.ones(4, 4)),
        "a number of the host": refused(lambda: x + torch.tensor(1.0)),
        "operator with the host": refused(lambda: torch_npu.npu_rms_norm(x, torch.ones(4))),
        "operator with another card": refused(lambda: torch_npu.npu_rms_norm(x, torch.ones(4, device="npu:1"))),
        "operator in float64": refused(lambda: torch_npu.npu_rms_norm(x.double(), x[0].double())),
        "mask the wrong way round": refused(
            lambda: torch_npu.npu_fusion_attention(
                q, q, q, 2, "TND", sparse_mode=3, atten_mask=torch.ones(2048, 2048, device="npu").tril().bool(), **ends
            )
        ),
        "an operator that is not simulated": refused(lambda: torch_npu.npu_fast_gelu(x)),
        "two cards": refused(lambda: x + torch.ones(4, 4, device="npu:1")),
    }


def without_torch_accelerator(*_: object) -> Any:
    raise RuntimeError("Allocator for npu is not a DeviceAllocator.")  # as with torch and torch_npu 2.10


def counted() -> dict[str, float]:
    """What a job says of the memory, where torch.accelerator knows nothing of it."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("memory_stats", "memory_allocated", "memory_reserved", "max_memory_allocated"):
            patch.setattr(torch.accelerator, name, without_torch_accelerator)
        return {**allocator_stats(DEVICE.torch_device), "peak_bytes": float(DEVICE.peak_memory_bytes())}


def memory() -> Any:
    torch.npu.empty_cache()
    torch.npu.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    x = torch.ones(1 << 20, device="npu")
    held = torch.accelerator.memory_allocated() - before
    y = x + 1
    del y
    peak = torch.accelerator.max_memory_allocated() - before
    said = counted()
    free, total = torch.npu.mem_get_info()
    error = refused(lambda: torch.empty(600 << 20, dtype=torch.uint8, device="npu").repeat(2))
    del x
    return {
        "held": held,
        "peak": peak,
        "after": torch.accelerator.memory_allocated() - before,
        "said": {name: value - before for name, value in said.items()},
        "free_is_less": free < total == 1 << 30,
        "statistics": len(torch.npu.memory_stats()),
        "summary": "NPU memory summary" in torch.npu.memory_summary() or "summary" in torch.npu.memory_summary(),
        "error": error,
        "goes_on": float(torch.ones(4, device="npu").sum()),
    }


def randomness() -> Any:
    own = torch.Generator("npu").manual_seed(5)
    state = own.get_state()
    first, second = (torch.rand(4, generator=own, device="npu") for _ in range(2))
    own.set_state(state)
    again = [torch.rand(4, generator=own, device="npu") for _ in range(2)]
    dropped = []
    for seed in (1, 1, 2):
        torch.npu.manual_seed(seed)
        before = torch.get_rng_state()
        dropped.append([F.dropout(torch.ones(64, device="npu"), 0.5) for _ in range(2)])
        assert torch.equal(before, torch.get_rng_state()), "the host's generator is not the card's"
    torch.manual_seed(1)
    one = torch.randn(4, device="npu")
    torch.npu.manual_seed(1)
    two = torch.randn(4, device="npu")
    return {
        "repeats": torch.equal(first, again[0]) and torch.equal(second, again[1]),
        "moves_on": not torch.equal(first, second),
        "one_seed_for_all": torch.equal(one, two),
        "dropout_repeats": all(torch.equal(a, b) for a, b in zip(*dropped[:2], strict=True)),
        "dropout_moves_on": not torch.equal(*dropped[0]) and not torch.equal(dropped[0][0], dropped[2][0]),
    }


def around() -> Any:
    stream, start, end = torch.npu.Stream(), torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
    with torch.npu.stream(stream):
        start.record()
        (torch.ones(64, 64, device="npu") @ torch.ones(64, 64, device="npu")).sum()
        end.record()
    torch.npu.synchronize()
    with torch.autocast("npu", torch.bfloat16):
        half = torch.nn.functional.linear(torch.ones(2, 4, device="npu"), torch.ones(3, 4, device="npu")).dtype
    other = torch.ones(3, device="npu:1")
    return {
        "ms": start.elapsed_time(end) >= 0,
        "autocast": str(half),
        "other_card": [str((other * 2).device), (other.to("npu:0") + torch.ones(3, device="npu:0")).tolist()],
        "pinned": bool(torch.equal(torch.ones(3).pin_memory().to("npu", non_blocking=True).cpu(), torch.ones(3))),
        "deterministic": torch.get_deterministic_debug_mode(),
    }


def doctor() -> Any:
    """The trial of kernels that `run doctor` makes on each card."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        smoke_test.main(["kernels", "npu"])
    return [json.loads(line) for line in said.getvalue().splitlines()]


def schemas() -> Any:
    found = {}
    for name in FUSED:
        base, _, overload = name.partition(".")
        found[name] = str(getattr(getattr(torch.ops.npu, base), overload or "default")._schema)
    return found


PROBES = (
    identity, arithmetic, gradients, flash_attention, experts, strictness, randomness, around, doctor, schemas, memory,
)  # fmt: skip

if __name__ == "__main__":
    wanted = sys.argv[1:]
    print(json.dumps({probe.__name__: probe() for probe in PROBES if not wanted or probe.__name__ in wanted}))
