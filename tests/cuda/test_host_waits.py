"""Between the first forward and the last backward pass of a mini-batch the host waits for no device.

On a GPU torch's sync debug mode raises an error where the host waits. On the device `meta` tensors have no values, so
that reading one raises an error too: the same test then needs no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.distributed.work_partition import SingleStage
from runner.interfaces import PipelineOp
from tests.cuda.jobs import first_mini_batch

SAMPLED = ("sampler.max_new_tokens=8", "reward=length", "reward.max_length=8", "reward.overlong_buffer_len=7")
JOBS = {
    "sft": ("+recipe=sft_demo",),
    "lora": ("+recipe=sft_demo", "adapter=lora"),
    "recomputing": ("+recipe=sft_demo", "model.gradient_checkpointing=true"),
    "experts": ("+recipe=sft_demo", "model=tiny_moe"),
    "dpo": ("+recipe=dpo_demo",),
    "kto": ("+recipe=dpo_demo", "algorithm=kto"),
    "reward model": ("+recipe=rm_demo",),
    "grpo": ("+recipe=grpo_demo", *SAMPLED),
    "gspo": ("+recipe=grpo_demo", "algorithm=gspo", *SAMPLED),
    "ppo": ("+recipe=ppo_demo", *SAMPLED),
    "ppo, shared critic": ("+recipe=ppo_demo", "algorithm.critic=shared", *SAMPLED),
}
NO_META = ("experts", "ppo, shared critic")  # grouped products and a read of the values, which meta has not
CASES = [
    *((job, "meta") for job in JOBS if job not in NO_META),
    *(pytest.param(job, "cuda", marks=pytest.mark.cuda) for job in JOBS),
]


class PassesEnded(Exception):
    """All forward and backward passes of a mini-batch were made; what follows reads the loss, and waits."""


class Turns(list[PipelineOp]):
    """Passes that may not wait for a device, and end with PassesEnded."""

    def __iter__(self) -> Iterator[PipelineOp]:
        with refusing_waits():
            yield from super().__iter__()
        raise PassesEnded


class Observed(SingleStage):
    """The stage of a whole model, with `Turns`."""

    def schedule(self, count: int) -> Turns:
        """See `SingleStage`."""
        assert count > 1, "several micro-batches, whose metrics are merged"
        return Turns(super().schedule(count))


@contextmanager
def refusing_waits() -> Iterator[None]:
    """While it is an error that the host waits for a GPU."""
    if not torch.cuda.is_available():
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("job", "device"), CASES)
def test_no_pass_waits(job: str, device: str, tmp_path: Path) -> None:
    where = ("device=cuda", "device.deterministic=false") if device == "cuda" else ()
    made, batch = first_mini_batch((*JOBS[job], *where), tmp_path)
    for role, loss in made.algorithm.losses.items():
        learner: Any = made.learners[role]
        learner.forward_backward(batch, loss)  # the first pass makes handles and workspaces
        if device == "meta":
            learner.model.module.to("meta")
            learner.model.device = learner._device = torch.device("meta")
        learner._stage = Observed()
        with pytest.raises(PassesEnded):
            learner.forward_backward(batch, loss)


@pytest.mark.cuda
@pytest.mark.parametrize("job", ["sft", "lora"])
def test_no_update_waits_until_it_is_read(job: str, tmp_path: Path) -> None:
    made, batch = first_mini_batch((*JOBS[job], "device=cuda", "device.deterministic=false"), tmp_path)
    learner, loss = made.learners["policy"], made.algorithm.losses["policy"]
    learner.update(batch, loss)()  # the first one makes handles, workspaces and the optimizer's state
    with refusing_waits():
        read = learner.update(batch, loss)
    assert learner.reads_late and read().result()["train/grad_norm"] > 0  # type: ignore[attr-defined]


def test_a_wait_is_seen(tmp_path: Path) -> None:
    made, batch = first_mini_batch(JOBS["sft"], tmp_path)
    learner: Any = made.learners["policy"]
    learner.model.module.to("meta")
    learner.model.device = learner._device = torch.device("meta")
    with pytest.raises((RuntimeError, NotImplementedError)):
        learner.forward_backward(batch, made.algorithm.losses["policy"])


@pytest.mark.cuda
def test_a_wait_for_a_gpu_is_seen() -> None:
    number = torch.ones((), device="cuda")
    with refusing_waits(), pytest.raises(RuntimeError, match="synchroniz"):
        number.item()
