"""The story of docs/stories/ascend.md: every command works as typed, and prints what the page shows but its numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stories import ROOT, STORY_PAGES, missing_lines, play


@pytest.mark.slow
def test_it_prints_what_its_page_shows(simulator: Path, tmp_path: Path) -> None:
    def start(*words: str, cwd: Path) -> str:
        """In a process that has not imported torch, whose simulator must come first."""
        environment = os.environ | {"PYTHONPATH": str(ROOT), "RUNNER_CACHE": str(simulator)}
        done = subprocess.run(
            [sys.executable, "-m", "runner", *words], cwd=cwd, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    for typed, printed in play(STORY_PAGES / "ascend.md", tmp_path, start):
        assert missing_lines(typed, printed) == [], f"{typed.line}\n{printed}"
