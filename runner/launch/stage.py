"""A run that is a stage of a job: it leaves it to the job to say what to type next."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from runner.folder import shown

STAGE = "RUNNER_STAGE"  # set in the environment of a recipe that is run first


def is_stage() -> bool:
    """Whether this process runs a stage of another job."""
    return STAGE in os.environ


def environment() -> Mapping[str, str]:
    """The environment of a stage's process."""
    return {**os.environ, STAGE: "1"}


def go_on(recipe: str, run: Path | None, first: Mapping[str, str], typed: Sequence[str] | None = None) -> str:
    """What to type where a stage was interrupted; empty if the job is a stage itself.

    run: the stage's folder, if it has a checkpoint; first: what to set, beside what was `typed` (None: the words of
    this process), for stages that need not be run again, the interrupted one included.
    """
    if is_stage():
        return ""
    words = ["run", *(sys.argv[1:] if typed is None else typed)]
    again = f"\ngo on    {shlex.join(words)}     (runs +recipe={recipe} anew)"
    if run is None:
        return again
    kept = [word for word in words if word.partition("=")[0] not in first]
    after = shlex.join([*kept, *(f"{key}={value}" for key, value in first.items())])
    return f"{again}\nor       run resume {shlex.quote(shown(run))} && {after}"
