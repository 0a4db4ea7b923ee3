"""Whole jobs with sharded models against one process; see `test_jobs`, whose jobs and bounds they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallelism.test_jobs import SLOW, compare

MORE = ("padded", "dpo_lora", "copied", "ahead", "lora", "ppo", "opd", "distill", "shared", "rm")


@pytest.mark.parametrize("name", ["sft", pytest.param("tools", marks=pytest.mark.slow)])
def test_two_shards_do_what_one_process_does(name: str, workdir: Path) -> None:
    compare(2, SLOW[name], workdir, "parallelism=fsdp")


@pytest.mark.slow
@pytest.mark.parametrize("words", [SLOW[name] for name in MORE], ids=MORE)
def test_more_jobs_on_two_shards(words: str, workdir: Path) -> None:
    compare(2, words, workdir, "parallelism=fsdp")


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["fsdp", "tp"])
def test_experts_that_are_replayed_on_two_ranks(preset: str, workdir: Path) -> None:
    compare(2, SLOW["ahead"] + " model.router_replay=sampler", workdir, f"parallelism={preset}", kind="tiny_moe")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sft", "tools", "dpo_lora"])
def test_two_copies_of_two_shards(name: str, workdir: Path) -> None:
    compare(4, SLOW[name], workdir, "parallelism=hsdp")
