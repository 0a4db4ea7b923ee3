"""Recipes with option names of an older version, rewritten in place."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from runner.cli.main import main
from runner.cli.migrate_file import migrated_text
from runner.spec.saved_spec import translate_spec

RENAMED = """# mine
sampler:   # here
  eager: true  # was needed
  cache_gib: 2

  max_new_tokens: 8
data:
  columns:
    # of my file
    q: prompt
"""
RENAMED_NOW = """# mine
sampler:   # here
  enforce_eager: true  # was needed
  kv_cache_memory_bytes: 2147483648

  max_new_tokens: 8
data:
  rename_columns:
    # of my file
    q: prompt
"""
RECIPES = {
    "renamed": (RENAMED, RENAMED_NOW),
    "in braces": (
        "algorithm: {overlong: mask, objective: clip}\n",
        "algorithm: {mask_truncated: true, policy_loss: clip}\n",
    ),
    "moved to a new section": (
        "data:\n  loss_on: last_assistant  # only the last\n  name: file\nsteps: 3",
        "data:\n  name: file\nsteps: 3\n\nchat:\n  train_on: last  # only the last\n",
    ),
    "moved to a section that is there": (
        "chat:\n    template: t.jinja\ndata:\n  loss_on: all\n  name: file\n",
        "chat:\n    template: t.jinja\n    train_on: all\ndata:\n  name: file\n",
    ),
    "without effect now": ("model:\n  dtype: float32\n  autocast: none\n", "model:\n  dtype: float32\n"),
    "of Windows": ("launch:\r\n  node: 0\r\n", "launch:\r\n  node_rank: 0\r\n"),
    "of this version": (RENAMED_NOW, RENAMED_NOW),
    "another level": ("steps: 3\nname: eager\n", "steps: 3\nname: eager\n"),
}


@pytest.mark.parametrize(("old", "new"), RECIPES.values(), ids=RECIPES)
def test_old_names_become_those_of_this_version(old: str, new: str) -> None:
    assert migrated_text(old) == (new, [])
    assert migrated_text(new) == (new, [])
    assert translate_spec(yaml.safe_load(old)).data == {**translate_spec(yaml.safe_load(new)).data}


def test_files_are_rewritten_and_the_difference_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text(RENAMED)
    second.write_text(RENAMED_NOW)
    assert main(["migrate", str(first), str(second)]) == 0
    assert first.read_text() == second.read_text() == RENAMED_NOW
    out = capsys.readouterr().out
    assert "-  eager: true" in out and "+  enforce_eager: true" in out and f"{second}: nothing to rename" in out


def test_what_a_person_has_to_decide_stays_and_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("launch: {node: 0}\nmodel: {autocast: none}\n")
    assert main(["migrate", str(mine)]) == 2
    assert mine.read_text() == "launch: {node_rank: 0}\nmodel: {autocast: none}\n"
    error = capsys.readouterr().err
    assert f"{mine}:2" in error and "model.autocast" in error and "leave it out" in error


def test_an_option_whose_name_has_another_meaning_now_stays_and_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("evaluation: {samples: '${oc.env:NOT_SET}'}\n")
    assert main(["migrate", str(mine)]) == 0
    assert "nothing to rename" in (said := capsys.readouterr().out) and "stays" not in said, (
        "of today, as far as it says"
    )
    mine.write_text("evaluation: {samples: '${elsewhere.samples}'}\nlaunch: {node: 0}\n")
    assert main(["migrate", str(mine)]) == 0
    assert mine.read_text() == "evaluation: {samples: '${elsewhere.samples}'}\nlaunch: {node_rank: 0}\n"
    assert "evaluation.samples stays; in a file of an older version it meant evaluation.logged_samples" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize("content", ["a: [", "x: 1\nx: 2\n", "data:\n  loss_on: all\nchat: {}\n", "just text"])
def test_what_cannot_be_rewritten_stays_as_it_is(content: str, tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(content)
    assert main(["migrate", str(mine)]) == 2
    assert mine.read_text() == content
