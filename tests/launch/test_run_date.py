"""The day on which a run begins is part of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.cli.job_builder import compose_job
from runner.launch import local
from runner.launch.local import prepare_spec
from runner.run_dir.manifest import immutable_fields


@pytest.mark.parametrize(("words", "expected"), [([], "2024-02-02"), (["chat.date='2024-02-03'"], "2024-02-03")])
def test_a_run_keeps_the_day_on_which_it_began(
    words: list[str], expected: str, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "today", lambda: "2024-02-02")
    spec = prepare_spec(compose_job(["model=tiny", "data=demo", "device=cpu", *words]).spec)
    assert spec.chat.date == expected
    assert immutable_fields(spec)["chat"]["date"] == expected, "a resume cannot change it"
    monkeypatch.setattr(local, "today", lambda: "2024-02-04")
    assert prepare_spec(spec.model_copy(update={"chat": spec.chat})).chat.date == expected
