"""Whole jobs with layers in stages against one process; see `test_jobs`, whose jobs and bounds they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallelism import test_jobs
from tests.parallelism.test_jobs import FAST, SLOW, compare

MORE = [name for name in SLOW if name not in ("sft", "tools")]


@pytest.mark.parametrize("name", ["sft", pytest.param("tools", marks=pytest.mark.slow)])
def test_two_stages_do_what_one_process_does(name: str, workdir: Path) -> None:
    compare(2, FAST[name], workdir, "parallelism=pp")


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_more_jobs_in_two_stages(name: str, workdir: Path) -> None:
    compare(2, SLOW[name], workdir, "parallelism=pp")


@pytest.mark.soak
@pytest.mark.parametrize("name", ["sft", "tools", "dpo_lora", "ppo"])
@pytest.mark.parametrize("preset", ["ddp", "fsdp", "tp"])
def test_two_stages_on_four_ranks(name: str, preset: str, workdir: Path) -> None:
    compare(4, SLOW[name], workdir, f"parallelism={preset}", "parallelism.pp=2")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sft", "tools", "shared"])
def test_stages_of_two_runs_of_layers(name: str, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_jobs, "SMALL", test_jobs.SMALL.replace("model.layers=2", "model.layers=4"))
    compare(2, SLOW[name], workdir, "parallelism=pp", "parallelism.pp_virtual_stages=2")
