"""What is said of DeepSpeed's ways before a job begins, whether it is installed or not."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from runner.cli.job_builder import compose_job
from runner.core.errors import EnvironmentProblem, SpecError
from runner.parallelism.config import Zero2Config, Zero3Config
from runner.parallelism.deepspeed_zero import _group_entry
from runner.parallelism.mesh import Mesh

WORDS = ["+recipe=sft_demo", "launch.devices=2"]
ALONE = ["+recipe=sft_demo", "parallelism=deepspeed_zero2"]


def test_every_rank_has_a_share_of_the_work() -> None:
    assert compose_job([*WORDS, "parallelism=deepspeed_zero3"]).spec.parallelism == Zero3Config()
    assert Zero2Config().mesh(3) == Mesh(dp_replicate=3)


@pytest.mark.parametrize(
    ("words", "key", "said"),
    [
        ("parallelism=deepspeed_zero2 parallelism.tp=2", "parallelism.tp", "tp"),
        ("parallelism=deepspeed_zero2 +recipe=ppo_demo", "algorithm.name", "deepspeed_zero3"),
        ("parallelism=deepspeed_zero2 model.compile=true", "model.compile", "leave it out"),
        ("parallelism=deepspeed_zero3 model.dtype=bfloat16 adapter=lora", "model.dtype", "or deepspeed_zero2"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(words: str, key: str, said: str) -> None:
    with pytest.raises(SpecError) as caught:
        compose_job([*(WORDS if "+recipe" not in words else WORDS[1:]), *words.split()])
    [message] = [problem.message for problem in caught.value.problems if problem.key == key]
    assert said in message


@pytest.mark.parametrize(("is_fused", "device"), [(True, "meta"), (False, "cpu")])
def test_a_restored_number_of_steps_is_where_the_kernel_reads_it(is_fused: bool, device: str) -> None:
    """A fused AdamW on a card cannot read it from the host, where a checkpoint has it."""
    step, flat = torch.tensor(3.0), torch.empty(4, device="meta")
    found = _group_entry("step", flat, [{"step": step}, {"step": step.clone()}], is_fused)
    assert found is not step and found.device.type == device and found.dtype == torch.float32


def test_one_process_is_refused() -> None:
    with pytest.raises(SpecError, match="needs several processes"):
        compose_job(ALONE)


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is not None, reason="DeepSpeed is installed")
def test_where_it_is_missing_the_extra_is_named() -> None:
    with pytest.raises(EnvironmentProblem, match=r"posttrain-run\[deepspeed\]"):
        Zero3Config().preflight()
