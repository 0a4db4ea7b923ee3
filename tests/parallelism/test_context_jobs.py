"""Whole jobs whose ranks share every batch's tokens against one process; jobs and bounds are those of `test_jobs`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallelism.test_jobs import FAST, GRADIENTS, SLOW, compare

MORE = ("dpo_lora", "copied", "ahead", "lora", "ppo", "opd", "distill", "shared", "rm", "kto", "resampled", "cpt")


@pytest.mark.parametrize(("name", "style"), [("sft", "ring"), pytest.param("tools", "ulysses", marks=pytest.mark.slow)])
def test_two_ranks_do_what_one_process_does(name: str, style: str, workdir: Path) -> None:
    compare(2, FAST[name], workdir, "parallelism=cp", f"parallelism.cp_backend={style}")


@pytest.mark.slow
@pytest.mark.parametrize("style", ["ulysses", pytest.param("ring", marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", MORE)
def test_more_jobs_on_two_ranks(name: str, style: str, workdir: Path) -> None:
    # scores of rows that hardly differ are subtracted: what is left has few digits, and every rank rounds again
    bound = 2e-4 if name == "rm" else GRADIENTS
    compare(2, SLOW[name], workdir, "parallelism=cp", f"parallelism.cp_backend={style}", gradients=bound)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["sft", "tools", "dpo_lora", "ppo"])
@pytest.mark.parametrize("preset", ["ddp", "fsdp", "tp", "pp"])
def test_two_ranks_beside_others(name: str, preset: str, workdir: Path) -> None:
    compare(4, SLOW[name], workdir, f"parallelism={preset}", "parallelism.cp=2")


@pytest.mark.slow
@pytest.mark.parametrize("style", ["ulysses", "ring"])
def test_experts_of_two_ranks_that_share_tokens(style: str, workdir: Path) -> None:
    spread = ("parallelism=cp", f"parallelism.cp_backend={style}", "parallelism.ep=2")
    compare(2, SLOW["cpt"], workdir, *spread, kind="tiny_moe")
