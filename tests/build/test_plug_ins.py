"""The code of plug-ins that a job uses is a part of its identity."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.build.plug_ins import plug_in_digests
from runner.cli.job_builder import compose_job
from runner.run_dir.manifest import check_compatible
from runner.spec.job import JobSpec
from runner.spec.saved_spec import KEY, SCHEMA
from tests.reward.test_trial import SMALL


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[JobSpec]:
    """A job whose environment comes from a package beside this project."""
    (tmp_path / "mine/deep").mkdir(parents=True)
    (tmp_path / "mine/__init__.py").touch()
    (tmp_path / "mine/deep/more.py").write_text("VALUE = 1")
    (tmp_path / "mine/guess.py").write_text(
        "from runner.environment.config import NoEnvironmentConfig\nclass Guess(NoEnvironmentConfig): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    from mine.guess import Guess  # type: ignore[import-not-found]

    yield compose_job([*SMALL, "reward=exact"]).spec.model_copy(update={"environment": Guess()})
    for name in [name for name in sys.modules if name.partition(".")[0] == "mine"]:
        del sys.modules[name]


def test_a_resumed_run_names_a_plug_in_that_changed(
    job: JobSpec, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = plug_in_digests(job)
    assert list(before) == ["plug-in mine"] and plug_in_digests(job) == before
    same = {KEY: SCHEMA, "data": "d", "model": {}}
    check_compatible(same | before, same | before)
    assert caplog.text == ""
    (tmp_path / "mine/deep/more.py").write_text("VALUE = 2")
    check_compatible(same | plug_in_digests(job), same | before)
    assert "resumed, but not bit for bit: plug-in mine was" in caplog.text


def test_a_job_of_built_in_components_has_none() -> None:
    assert plug_in_digests(compose_job([*SMALL, "reward=exact"]).spec) == {}
