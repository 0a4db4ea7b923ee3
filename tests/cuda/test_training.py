"""One update on a device: sharded on one rank, and in which data type its matrix products are computed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from runner.core.auto_choices import Decisions
from runner.core.batch import pack
from runner.distributed.dtensor_utils import full_tensor
from runner.interfaces import Device
from runner.parallelism.config import FsdpConfig
from runner.parallelism.mesh import Mesh
from tests.cuda.jobs import first_mini_batch
from tests.model import zoo
from tests.parallelism.worlds import TIMEOUT_S, meshed

PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_grouped_mm")
LORA = (
    "device=cuda",
    "device.deterministic=false",
    "+recipe=sft_demo",
    "adapter=lora",
    "model.dtype=bfloat16",
    "model.hidden_size=2048",
    "model.intermediate_size=6144",
    "model.heads=16",
    "model.kv_heads=8",
    "model.vocab_size=32768",
    "algorithm.micro_batch_tokens=4096",
    "algorithm.batch_size=512",
    "data.items=1024",
)


@pytest.fixture
def one_rank(device: Device, tmp_path: Path) -> Iterator[Device]:
    """A process group of this process alone, over the device's own backend."""
    here = device.torch_device
    distributed.init_process_group(
        device.backend,
        store=distributed.FileStore(str(tmp_path / "meeting"), 1),
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=TIMEOUT_S),
        device_id=here if here.type == "cuda" else None,
    )
    yield device
    distributed.destroy_process_group()


def updated(model: Any, device: torch.device, steps: int = 3) -> dict[str, Any]:
    """The losses of some steps, and the weights, whole and on the processor, after them."""
    ids = zoo.rows()
    batch = pack(ids, [[1.0] * len(row) for row in ids])
    parameters = model.trainable()
    optimizer, losses = torch.optim.AdamW(parameters.values(), lr=1e-3, eps=1e-4, fused=True), []
    model.train()
    for _ in range(steps):
        total, _ = model.linear_loss(batch.to(device), -batch.tokens["weight"] / batch.num_tokens)
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total.detach()))
    return {"losses": losses, "weights": {name: full_tensor(p).detach().cpu() for name, p in parameters.items()}}


def test_a_model_sharded_on_one_rank_learns_as_it_is(one_rank: Device) -> None:
    here, alone, model = one_rank.torch_device, zoo.causal("qwen3"), zoo.causal("qwen3")
    meshed(FsdpConfig(), Mesh(dp_shard=1), on=one_rank).shard(model, Decisions())
    assert all(isinstance(p, DTensor) and p.device.type == here.type for p in model.whole.parameters())
    alone.module.to(here)
    alone.device = here
    wanted, got = updated(alone, here), updated(model, here)
    assert got["losses"] == pytest.approx(wanted["losses"], rel=1e-5) and got["losses"][-1] < got["losses"][0]
    for name, weight in wanted["weights"].items():
        torch.testing.assert_close(got["weights"][name], weight, rtol=1e-3, atol=1e-4)


def products(trace: Path) -> dict[str, float]:
    """What matrix products of a torch trace take, by the data type of their operands: microseconds of GPU kernels, or,
    where no kernel ran on a GPU, multiplications."""
    events = json.loads(trace.read_text())["traceEvents"]
    kernels: dict[int, float] = {}
    for event in events:
        if event.get("cat") == "kernel":
            source = event["args"]["External id"]
            kernels[source] = kernels.get(source, 0.0) + event["dur"]
    found: dict[str, float] = {}
    for event in events:
        if event.get("cat") == "cpu_op" and event["name"] in PRODUCTS:
            kinds, sizes = event["args"]["Input type"], event["args"]["Input Dims"]
            [*_, left, right] = [at for at, size in enumerate(sizes) if len(size) > 1]
            taken = (
                kernels.get(event["args"]["External id"], 0.0) if kernels else math.prod(sizes[left]) * sizes[right][-1]
            )
            found[kinds[left]] = found.get(kinds[left], 0.0) + taken
    return found


def traced(work: Callable[[], object], trace: Path) -> dict[str, float]:
    """The `products` of some work, which it does once before: kernels are chosen in the first one."""
    work()
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with profile(activities=activities, record_shapes=True, acc_events=True) as observed:
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    observed.export_chrome_trace(str(trace))
    return products(trace)


def test_products_are_counted_by_the_data_type_of_their_operands(tmp_path: Path) -> None:
    half, single = torch.ones(8, 16, dtype=torch.bfloat16, requires_grad=True), torch.ones(2, 4, 4)

    def work() -> None:
        (half @ half.T).sum().backward()  # type: ignore[no-untyped-call]
        torch.addmm(single[0], single[0], single[1])
        torch.bmm(single, single)

    assert traced(work, tmp_path / "trace.json") == {"c10::BFloat16": 3 * 8 * 16 * 8, "float": 4**3 + 2 * 4**3}


def test_products_on_a_gpu_are_counted_by_the_time_of_their_kernels(tmp_path: Path) -> None:
    def event(kind: str, name: str, source: int, dur: float, dtype: str = "float") -> dict[str, Any]:
        given = {"External id": source, "Input type": [dtype, dtype], "Input Dims": [[4, 4], [4, 4]]}
        return {"cat": kind, "name": name, "dur": dur, "args": given}

    events = [
        event("cpu_op", "aten::mm", 1, 90.0),
        event("cpu_op", "aten::mm", 2, 80.0, "c10::BFloat16"),
        event("cpu_op", "aten::add", 3, 70.0),
        event("kernel", "gemm", 1, 1.0),
        event("kernel", "splitK", 1, 2.0),
        event("kernel", "gemm", 2, 4.0),
        event("kernel", "add", 3, 8.0),
        {"ph": "M", "name": "process_name"},
    ]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    assert products(tmp_path / "trace.json") == {"float": 3.0, "c10::BFloat16": 4.0}


@pytest.mark.cuda
def test_a_lora_step_computes_its_products_in_bfloat16(tmp_path: Path) -> None:
    job, batch = first_mini_batch(LORA, tmp_path)
    [(role, loss)] = job.algorithm.losses.items()

    def work() -> None:
        job.learners[role].forward_backward(batch, loss)
        job.learners[role].optim_step()

    taken = traced(work, tmp_path / "trace.json")
    assert taken["c10::BFloat16"] > 0
    assert sum(taken.values()) - taken["c10::BFloat16"] < 0.02 * sum(taken.values()), taken


@pytest.mark.cuda
def test_layers_are_compiled_by_default_and_give_the_same_gradients(tmp_path: Path) -> None:
    plain = ("device=cuda", "device.deterministic=false", "device.tf32=false", "model.dtype=float32")
    found = []
    for way in ("null", "false"):
        job, batch = first_mini_batch(("+recipe=sft_demo", *plain, f"model.compile={way}"), tmp_path / way)
        learner: Any = job.learners["policy"]
        assert (learner.model._compiled is not None) == (way == "null")
        learner.forward_backward(batch, job.algorithm.losses["policy"])
        found.append({name: weight.grad.cpu() for name, weight in learner.model.trainable().items()})
    assert zoo.relative(*found) < 1e-4
