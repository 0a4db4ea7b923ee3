"""The token of a job's rollout servers: the launcher makes it for the servers and rank 0."""

from __future__ import annotations

import os

from runner.core.errors import EnvironmentProblem

TOKEN = "RUN_SAMPLER_TOKEN"  # the environment variable in which a process of the job gets it
_token: list[str] = []


def take_token() -> None:
    """Move the token out of the environment, so that child processes, such as a user's reward, lack it."""
    if found := os.environ.pop(TOKEN, None):
        _token[:] = [found]


def job_token() -> str:
    """The token, also after `take_token`. Raises EnvironmentProblem where there was none."""
    take_token()
    if _token:
        return _token[0]
    raise EnvironmentProblem(f"{TOKEN} is not set; the launcher of a job sets it for rank 0 and for samplers")
