"""Whole jobs with layers in slices against one process; see `test_jobs`, whose jobs and bounds they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallelism.test_jobs import FAST, GRADIENTS, SLOW, compare

MORE = ("padded", "copied", "ahead", "lora", "ppo", "opd", "distill", "shared", "rm", "kto", "resampled")


@pytest.mark.parametrize("name", ["sft", pytest.param("tools", marks=pytest.mark.slow)])
def test_two_slices_do_what_one_process_does(name: str, workdir: Path) -> None:
    compare(2, FAST[name], workdir, "parallelism=tp")


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_more_jobs_on_two_slices(name: str, workdir: Path) -> None:
    # scores of rows that hardly differ are subtracted: what is left has few digits, and slices round again
    compare(2, SLOW[name], workdir, "parallelism=tp", gradients=2e-4 if name == "rm" else GRADIENTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sft", "tools", "dpo_lora", "ppo"])
@pytest.mark.parametrize("preset", ["ddp", "fsdp"])
def test_two_slices_on_two_data_ranks(name: str, preset: str, workdir: Path) -> None:
    compare(4, SLOW[name], workdir, f"parallelism={preset}", "parallelism.tp=2")
