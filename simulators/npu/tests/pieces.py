"""Run as two processes, a rank and a card each: a sharded model over "hccl"; `pieces.py RANK FILE`, rank 0 prints JSON.

Each kind: the largest difference, over the largest weight, between the weights after 3 steps on two cards and those of
one process on the CPU; and what the backend was given.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from npu_simulator.config import NpuSimConfig

CONFIG = NpuSimConfig(cards=2, memory_gib=1.0)
CONFIG.enter()

import torch  # noqa: E402
from torch import distributed  # noqa: E402

from npu_simulator.device import NpuSim  # noqa: E402
from runner.adapter import lora  # noqa: E402
from runner.adapter.config import LoraConfig  # noqa: E402
from runner.core.auto_choices import Decisions  # noqa: E402
from runner.core.batch import Batch, pack  # noqa: E402
from runner.distributed import dtensor_utils  # noqa: E402
from runner.parallelism.config import FsdpConfig  # noqa: E402
from runner.parallelism.mesh import Mesh  # noqa: E402
from tests.model import zoo  # noqa: E402
from tests.parallelism.worlds import meshed  # noqa: E402


def made(kind: str) -> Any:
    family, _, how = kind.partition(" ")
    model: Any = zoo.causal(family)
    if how != "full":
        if "bfloat16" in how:
            model.module.to(torch.bfloat16)
        model = lora.attach(LoraConfig(rank=4, targets=("q_proj", "v_proj")), model, decide=Decisions())
    return model


def part(rank: int, size: int) -> Batch:
    ids = zoo.rows((7, 3, 19, 5))[rank::size]
    return pack(ids, [[float(i >= len(row) // 3) for i in range(len(row))] for row in ids])


def learnt(model: Any, batch: Batch) -> dict[str, torch.Tensor]:
    parameters = model.trainable()
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-2, eps=1e-4)
    model.train()
    for _ in range(3):
        model.linear_loss(batch.to(model.device), -batch.tokens["weight"] / 20)[0].backward()
        norm = dtensor_utils.total_norm([p.grad for p in parameters.values() if p.grad is not None])
        torch.nn.utils.clip_grads_with_norm_(parameters.values(), 1.0, norm)
        optimizer.step()
        optimizer.zero_grad()
    return {name: dtensor_utils.full_tensor(p).cpu() for name, p in parameters.items()}


def apart(rank: int, device: NpuSim, kind: str, offload: bool) -> float:
    wanted, model = learnt(made(kind), part(0, 1)), made(kind)
    meshed(FsdpConfig(cpu_offload=offload), Mesh(dp_shard=2), device).shard(model, Decisions())
    got = learnt(model, part(rank, 2))
    scale = max(float(w.abs().max()) for w in wanted.values())
    return max(float((got[name] - w).abs().max()) for name, w in wanted.items()) / scale


def work(rank: int, meeting: Path, device: NpuSim) -> None:
    torch.npu.set_device(rank)
    store = distributed.FileStore(str(meeting), 2)
    distributed.init_process_group(device.backend, store=store, rank=rank, world_size=2)
    kinds = ("qwen3 full", "llama lora", "qwen2 lora bfloat16", "qwen3_moe lora")
    found = {kind: apart(rank, device, kind, False) for kind in kinds}
    found["qwen3 full offload"] = apart(rank, device, "qwen3 full", True)
    if rank == 0:
        print(json.dumps(found), flush=True)
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    work(int(sys.argv[1]), Path(sys.argv[2]), NpuSim(CONFIG, decide=Decisions()))
