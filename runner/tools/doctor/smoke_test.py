"""A tiny real run in child processes, one JSON line per result.

Usage: `python -m runner.tools.doctor.smoke_test WHAT DEVICE …`

    kernels npu              matmul and attention on every visible device, against float64 on the processor
    reduce npu 2             a sum over so many processes
    rank npu 0 2 FILE        one of those processes
    train npu FOLDER         one training step of model=tiny, by the command `run` itself

Never imported by the doctor: what fails or aborts here is evidence there.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from runner.core.device_kinds import KINDS
from runner.core.subprocess import ChildProcess, end_with_parent
from runner.device.process_setup import hide_torch_npu
from runner.spec.registry import default_registry
from runner.tools.doctor.system_info import device_config, trial_simulator

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Largest relative error: float32 products may run in TF32 or HF32 on an accelerator, attention runs in bfloat16 there.
TOLERANCE = {"cpu": 1e-5, "cuda": 2e-2, "npu": 2e-2}
MEETING_S = 90
JOB = (
    *("name=doctor", "steps=1", "model=tiny", "schedule=constant", "tracker=none", "evaluation.every=0"),
    *("algorithm=sft", "algorithm.batch_size=8", "data=demo", "data.items=16", "data.held_out=2", "checkpoint.every=1"),
)


def main(words: Sequence[str]) -> int:
    """Do what the words ask for."""
    end_with_parent(signal.SIGKILL)  # ends with the doctor, and survives exec
    what, device, *rest = words
    if (own := trial_simulator(device)) is not None:
        os.environ.pop(str(own.kind.visible), None)  # the cards are the trial's own
    if what == "train":
        os.chdir(rest[0])
        os.execv(sys.executable, [sys.executable, "-P", "-m", "runner", f"device={device}", *JOB])
    if what == "reduce":
        return _reduce(device, int(rest[0]))
    kind = _begin(device)
    if what == "rank":
        return _rank(kind, int(rest[0]), int(rest[1]), rest[2])
    for record in _kernels(kind):
        print(json.dumps(record), flush=True)
    return 0


def _begin(device: str) -> str:
    """Make this process one that has the device; returns torch's name for it."""
    hide_torch_npu(device, device_config(device).kind)
    if (own := trial_simulator(device)) is None:
        return device
    from runner.core.auto_choices import Decisions

    own.enter()  # before the factory imports torch
    default_registry().factory(own)(own, decide=Decisions())
    return own.kind.name


def _kernels(device: str) -> Iterator[dict[str, object]]:
    import torch

    count = 1 if device == "cpu" else torch.accelerator.device_count()
    for index in range(count):
        name = "cpu" if device == "cpu" else f"{device}:{index}"
        for what, trial in (("matmul", _matmul), ("attention", _attention)):
            error = trial(torch.device(name))
            yield {"device": name, "what": what, "error": error, "good": error <= TOLERANCE[device]}


def _matmul(device: torch.device) -> float:
    """Largest error of a [96, 256] by [256, 128] product in float32, relative to its largest value."""
    import torch

    torch.manual_seed(0)
    a, b = torch.randn(96, 256), torch.randn(256, 128)
    got = (a.to(device) @ b.to(device)).cpu()
    return _relative(got, a.double() @ b.double())


def _attention(device: torch.device) -> float:
    """Largest relative error of causal attention, [2, 4, 64, 32]; bfloat16 on accelerators."""
    import torch

    torch.manual_seed(0)
    dtype = torch.float32 if str(device) == "cpu" else torch.bfloat16
    q, k, v = (torch.randn(2, 4, 64, 32).to(dtype) for _ in range(3))
    attend = torch.nn.functional.scaled_dot_product_attention
    got = attend(q.to(device), k.to(device), v.to(device), is_causal=True).cpu()
    scores = q.double() @ k.double().transpose(-1, -2) / 32**0.5
    hidden = torch.ones(64, 64, dtype=torch.bool).triu(1)
    return _relative(got, scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v.double())


def _relative(got: Tensor, wanted: Tensor) -> float:
    """Largest difference of two tensors over the largest value; infinite where one is not finite."""
    error = float((got.double() - wanted).abs().max() / wanted.abs().max())
    return error if error == error else float("inf")


def _reduce(device: str, world: int) -> int:
    """Start the ranks and wait for them; what they print is this process's."""
    with tempfile.TemporaryDirectory(prefix="run-doctor-") as folder:
        command = [sys.executable, "-P", "-m", "runner.tools.doctor.smoke_test", "rank", device]
        words = [[*command, str(rank), str(world), f"{folder}/meet"] for rank in range(world)]
        ranks = [ChildProcess(one, own_session=False) for one in words]
        codes = [rank.wait() for rank in ranks]  # the doctor's deadline ends all of them
    return max(abs(code) for code in codes)


def _rank(device: str, rank: int, world: int, meeting: str) -> int:
    import torch
    from torch import distributed

    here = torch.device("cpu") if device == "cpu" else torch.device(device, rank)
    if device != "cpu":
        torch.accelerator.set_device_index(rank)
    distributed.init_process_group(
        KINDS[device].backend,
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=MEETING_S),
    )
    values = torch.full((1024,), float(rank + 1), device=here)
    distributed.all_reduce(values)
    wanted = world * (world + 1) / 2
    good = bool((values.cpu() == wanted).all())
    distributed.destroy_process_group()
    if rank == 0:
        backend = KINDS[device].collectives
        found = {"device": device, "what": "all-reduce", "backend": backend, "world": world, "good": good}
        print(json.dumps(found))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
