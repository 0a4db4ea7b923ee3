"""The stories of docs/stories: every command works as typed, and prints what the page shows, but for its numbers.

simulators/npu/tests/test_story.py has that on Ascend.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stories import STORIES, commands, missing_lines, play


def test_there_are_six() -> None:
    assert len(STORIES) == 6 and all(len(list(commands(page.read_text(encoding="utf-8")))) > 2 for page in STORIES)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in STORIES if page.stem != "ascend"], ids=lambda page: page.stem)
def test_a_story_prints_what_its_page_shows(page: Path, tmp_path: Path) -> None:
    for typed, printed in play(page, tmp_path):
        assert missing_lines(typed, printed) == [], f"{typed.line}\n{printed}"
