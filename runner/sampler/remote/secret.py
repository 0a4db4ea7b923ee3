"""The secret of a job: the launcher makes it, rank 0 shows it to the samplers. Nothing here imports torch."""

from __future__ import annotations

import os

from runner.core.errors import EnvironmentProblem

TOKEN = "RUN_SAMPLER_TOKEN"  # the variable in which a process of the job is given it
_taken: list[str] = []


def take() -> None:
    """Take it out of the environment, as early as may be: what this process starts, a user's reward for one, is not to
    have it."""
    if found := os.environ.pop(TOKEN, None):
        _taken[:] = [found]


def token() -> str:
    """It, also once it was taken. Raises EnvironmentProblem where there was none."""
    take()
    if _taken:
        return _taken[0]
    raise EnvironmentProblem(f"{TOKEN} is not set; the launcher of a job gives it to rank 0 and to samplers")
