"""Whole jobs with experts on several ranks against one process; see `test_jobs`, whose jobs and bounds they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallelism.test_jobs import FAST, SLOW, compare

MORE = ("dpo", "dpo_lora", "ppo", "padded", "copied", "ahead", "lora", "rm", "cpt", "shared")


def spread(size: int, words: str, root: Path, *layout: str) -> None:
    beside = " adapter.targets=[q_proj,v_proj]" if "adapter=lora" in words else ""
    compare(size, words + beside, root, *layout, kind="tiny_moe")


@pytest.mark.parametrize("name", ["sft", pytest.param("tools", marks=pytest.mark.slow)])
def test_two_ranks_of_experts_do_what_one_process_does(name: str, workdir: Path) -> None:
    spread(2, FAST[name], workdir, "parallelism=ep")


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_more_jobs_on_two_ranks_of_experts(name: str, workdir: Path) -> None:
    spread(2, SLOW[name], workdir, "parallelism=ep")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sft", "tools", "dpo", "ppo"])
@pytest.mark.parametrize("preset", ["ddp", "fsdp"])
def test_experts_on_two_of_four_ranks(name: str, preset: str, workdir: Path) -> None:
    spread(4, SLOW[name], workdir, f"parallelism={preset}", "parallelism.ep=2")
