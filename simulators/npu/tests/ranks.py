"""Run as two processes, a rank and a card each, with the backend "hccl": `ranks.py RANK FILE`; rank 0 prints JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from npu_simulator.config import NpuSimConfig

CONFIG = NpuSimConfig(cards=2, memory_gib=1.0)
CONFIG.enter()

import torch  # noqa: E402
from torch import distributed, nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from npu_simulator.device import NpuSim  # noqa: E402
from runner.core.auto_choices import Decisions  # noqa: E402
from runner.core.rank_info import RankInfo  # noqa: E402


def collectives(rank: int) -> dict[str, Any]:
    x = torch.full((2,), rank + 1.0, device="npu")
    total, mean, largest = x.clone(), x.clone(), x.clone()
    distributed.all_reduce(total)
    distributed.all_reduce(mean, op=distributed.ReduceOp.AVG)
    distributed.all_reduce(largest, op=distributed.ReduceOp.MAX)
    gathered = torch.empty(4, device="npu")
    distributed.all_gather_into_tensor(gathered, x)
    listed = [torch.empty(2, device="npu") for _ in range(2)]
    distributed.all_gather(listed, x)
    scattered = torch.empty(1, device="npu")
    distributed.reduce_scatter_tensor(scattered, x)
    exchanged = torch.empty(2, device="npu")
    distributed.all_to_all_single(exchanged, x + torch.arange(2.0, device="npu"))
    sent = x.clone()
    distributed.broadcast(sent, src=1)
    whole = torch.tensor([rank + 1], device="npu")
    distributed.all_reduce(whole)
    other = torch.empty(2, device="npu")
    if rank == 0:
        distributed.send(x, 1)
        distributed.recv(other, 1)
    else:
        distributed.recv(other, 0)
        distributed.send(x, 0)
    on_host = torch.tensor([rank + 1.0], dtype=torch.float64)
    distributed.all_reduce(on_host)
    distributed.barrier()
    found = {
        "sum": total, "mean": mean, "max": largest, "gathered": gathered, "listed": torch.cat(listed),
        "scattered": scattered, "exchanged": exchanged, "broadcast": sent, "int64": whole, "received": other,
        "host": on_host,
    }  # fmt: skip
    return {name: tensor.tolist() for name, tensor in found.items()}


def refused() -> dict[str, str]:
    tried = {
        "float64": lambda: distributed.all_reduce(torch.ones(2, dtype=torch.float64, device="npu")),
        "uint8": lambda: distributed.all_gather_into_tensor(
            torch.empty(4, dtype=torch.uint8, device="npu"), torch.ones(2, dtype=torch.uint8, device="npu")
        ),
        "bf16 exchanged": lambda: distributed.all_to_all_single(
            torch.empty(2, dtype=torch.bfloat16, device="npu"), torch.ones(2, dtype=torch.bfloat16, device="npu")
        ),
        "not contiguous": lambda: distributed.all_reduce(torch.ones(2, 3, device="npu").t()),
    }
    found = {}
    for name, action in tried.items():
        try:
            action()
            found[name] = "accepted"
        except (RuntimeError, ValueError) as error:
            found[name] = str(error)
    return found


def copied(model: nn.Module, rank: int) -> nn.Module:
    return DistributedDataParallel(model.npu(), device_ids=[rank])


def sharded(model: nn.Module, rank: int) -> nn.Module:
    mesh = distributed.device_mesh.init_device_mesh("npu", (2,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def apart(rank: int, shared: Callable[[nn.Module, int], nn.Module]) -> float:
    """The largest difference between weights after 3 steps on two ranks and those of one process on all rows."""
    rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    models = []
    for wrap, x in ((lambda model, rank: model, rows), (shared, rows[rank::2].npu())):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 1))
        wrapped = wrap(model, rank)
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.1)
        for _ in range(3):
            wrapped(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        models.append(wrapped)
    found = []
    for one, many in zip(models[0].parameters(), models[1].parameters(), strict=True):
        whole = many.full_tensor() if isinstance(many, DTensor) else many
        found.append(float((one - whole.cpu()).detach().abs().max()))
    return max(found)


def work(device: NpuSim, rank: int, meeting: Path) -> None:
    store = distributed.FileStore(str(meeting), 2)
    distributed.init_process_group(device.backend, store=store, rank=rank, world_size=2)
    found = {
        "collectives": collectives(rank),
        "refused": refused(),
        "apart": {f.__name__: apart(rank, f) for f in (copied, sharded)},
    }
    found["backend"] = distributed.get_backend_config()
    found["cards"] = [torch.npu.current_device(), device.torch_device.index]
    everyone: list[Any] = [None, None]
    distributed.all_gather_object(everyone, found["cards"], group=distributed.new_group(backend="gloo"))
    if rank == 0:
        print(json.dumps(found | {"cards": everyone}), flush=True)
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    mine = int(sys.argv[1])
    os.environ |= RankInfo(mine, 2, mine, 2).to_environment()
    work(NpuSim(CONFIG, decide=Decisions()), mine, Path(sys.argv[2]))
