"""What is seen of a user's file without running it."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.user_code.source_check import source_fault

FINDABLE = [
    "def score(): ...",
    "async def score(): ...",
    "score = lambda: 0",
    "from elsewhere import score",
    "from elsewhere import anything as score",
    "from elsewhere import *",
    "import score",
    "if True:\n    def score(): ...",
    "try:\n    import fast\nexcept ImportError:\n    def score(): ...",
    "a, (score, b) = make()",
]


@pytest.mark.parametrize("source", FINDABLE)
def test_a_name_bound_anywhere_in_the_module_is_found(source: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(source + "\nraise SystemExit('it ran')")
    assert source_fault(tmp_path / "mine.py", "score", "a.py:b") is None


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def scor(): ...\ndef other(): ...", "has no function 'score'; did you mean 'scor'? it has: scor, other"),
        ("x = 1", "has no function 'score'; it has no function"),
        ("def outer():\n    def score(): ...", "it has: outer"),
        ("class score: ...", "mine.py:1: score is a class; give a function"),
        ("def score(:", "mine.py:1: syntax error: "),
        ("\0", "cannot be read|syntax error"),
    ],
)
def test_what_is_missing_is_said(source: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(source)
    message = source_fault(tmp_path / "mine.py", "score", "a.py:b")
    assert message is not None and any(part in message for part in said.split("|"))


def test_a_file_that_shadows_pythons_own_is_refused(tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text("def score(): ...")
    message = source_fault(tmp_path / "random.py", "score", "a.py:b")
    assert message is not None and "rename the file" in message


def test_a_class_is_found_where_one_may_stand(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Shop: ...\ndef respond(): ...")
    assert source_fault(tmp_path / "mine.py", "Shop", "a.py:b", classes=True) is None
    message = source_fault(tmp_path / "mine.py", "Shp", "a.py:b", classes=True)
    assert message is not None and "did you mean 'Shop'? it has: Shop, respond" in message
