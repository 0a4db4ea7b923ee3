"""Jobs to be planned."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from runner.cli.job_builder import compose_job
from runner.cli.main import main
from runner.spec.job import JobSpec


@pytest.fixture
def compose() -> Callable[..., JobSpec]:
    """The spec of a command's words."""

    def composed(*words: str) -> JobSpec:
        return compose_job(list(words)).spec

    return composed


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """The exit code, output and errors of a command."""

    def done(*words: str) -> tuple[int, str, str]:
        code = main(words)
        return code, *capsys.readouterr()

    return done
