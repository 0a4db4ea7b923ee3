"""The pictures of the pages: each is what its script draws, stands on a page, and shows the numbers printed there."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from runner.tracker.text import format_number

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
SPEC = importlib.util.spec_from_file_location("make_pictures", DOCS / "make_pictures.py")
SCRIPT = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(SCRIPT)
# Whose last value the page prints, too.
PRINTED = [
    ("tutorial.md", "demo", "sft_demo", "eval/exact_match"),
    ("stories/sft.md", "sft", "shop", "eval/loss"),
    ("stories/dpo.md", "dpo", "polite", "reward/margin"),
    ("stories/grpo.md", "grpo", "digits", "reward/mean"),
    ("stories/sweep.md", "sweep", "lr=0.002 seed=1", "eval/loss"),
    ("stories/ascend.md", "ascend", "cpu", "train/loss"),
]


@pytest.mark.parametrize("name", SCRIPT.PICTURES)
def test_a_picture_is_what_its_script_draws(name: str) -> None:
    kept = (SCRIPT.FOLDER / f"{name}.svg").read_text(encoding="utf-8")
    ElementTree.fromstring(kept)
    assert kept == SCRIPT.PICTURES[name](), "run: make docs"


def test_each_picture_stands_on_a_page_which_describes_it() -> None:
    shown: dict[str, list[str]] = {}
    for page in DOCS.rglob("*.md"):
        for words, target in re.findall(r"!\[([^\]]*)\]\((\S+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).is_file(), f"{page}: {target}"
            shown.setdefault(Path(target).stem, []).append(words)
    assert shown.keys() == SCRIPT.PICTURES.keys() == {path.stem for path in SCRIPT.FOLDER.glob("*.svg")}
    assert min(len(words) for some in shown.values() for words in some) >= 20


@pytest.mark.parametrize(("page", "picture", "run", "metric"), PRINTED)
def test_a_page_prints_the_last_value_of_its_picture(page: str, picture: str, run: str, metric: str) -> None:
    measured = json.loads(SCRIPT.MEASURED.read_text(encoding="utf-8"))
    assert format_number(measured[picture][run][metric][-1][1]) in (DOCS / page).read_text(encoding="utf-8")
