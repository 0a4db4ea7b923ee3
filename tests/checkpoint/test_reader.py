"""Damage of every kind is noticed before use, named, and survived as long as one checkpoint is whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.checkpoint import step_folders
from runner.checkpoint.store import CheckpointStore
from runner.core.errors import CheckpointError

Damage = Callable[[Path], object]


def flip(position: int) -> Damage:
    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[position * (len(content) - 1) // 100] ^= 0x10
        path.write_bytes(content)

    return damage


DAMAGE: dict[str, Damage] = {
    "first byte": flip(0),
    "a byte in the middle": flip(50),
    "last byte": flip(100),
    "cut short": lambda p: p.write_bytes(p.read_bytes()[:-7]),
    "emptied": lambda p: p.write_bytes(b""),
    "grown": lambda p: p.write_bytes(p.read_bytes() + b"\0"),
    "removed": lambda p: p.unlink(),
    "a folder": lambda p: (p.unlink(), p.mkdir()),
    "not JSON": lambda p: p.write_bytes(b"{" + b"x" * (p.stat().st_size - 1)),
    "a dead link": lambda p: (p.unlink(), p.symlink_to("nowhere")),
}
FILES = ("policy.safetensors", "state.json", "MANIFEST.json")


@pytest.fixture
def whole(open_store: Callable[..., CheckpointStore], state_of: Callable[[int], Any], root: Path) -> Path:
    """Checkpoints of steps 1, 2 and 3."""
    store = open_store(keep=3)
    for step in (1, 2, 3):
        store.save(step, state_of(step), {"m": float(step)})
    return root


@pytest.mark.parametrize("damage", DAMAGE, ids=str)
@pytest.mark.parametrize("name", FILES)
def test_the_one_before_a_damaged_newest_is_used(whole: Path, words: list[str], name: str, damage: str) -> None:
    DAMAGE[damage](whole / "step-00000003" / name)
    loaded = step_folders.load(whole, report=words.append)
    assert loaded is not None and loaded.step == 2
    assert int(loaded.state["policy"]["tensors"]["count"]) == 2
    assert len(words) == 1
    assert words[0].startswith(f"checkpoint step-00000003: {name}: ")
    assert words[0].endswith("; trying the previous one")


@pytest.mark.parametrize("name", FILES)
def test_none_whole_is_an_error_that_lists_them(whole: Path, words: list[str], name: str) -> None:
    for step, damage in {1: "removed", 2: "cut short", 3: "first byte"}.items():
        DAMAGE[damage](whole / step_folders.folder_name(step) / name)
    with pytest.raises(CheckpointError, match="all 3 checkpoints are damaged or incomplete") as caught:
        step_folders.load(whole, report=words.append)
    assert caught.value.exit_code == 4
    assert all(f"{step_folders.folder_name(step)}: {name}: " in str(caught.value) for step in (1, 2, 3))


def test_a_chosen_step_that_is_damaged_is_not_replaced_by_another(whole: Path, words: list[str]) -> None:
    (whole / "step-00000002" / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"step-00000002: state\.json: No such file .*; other steps: 1, 3"):
        step_folders.load(whole, 2, report=words.append)


def test_an_empty_folder_counts_as_a_damaged_checkpoint(tmp_path: Path, words: list[str]) -> None:
    """It is never the start of a new run: somebody's state was there."""
    (tmp_path / "step-00000001").mkdir()
    with pytest.raises(CheckpointError, match=r"MANIFEST\.json: No such file"):
        step_folders.load(tmp_path, report=words.append)


def test_a_copied_folder_is_not_another_step(whole: Path, words: list[str]) -> None:
    (whole / "step-00000003").rename(whole / "step-00000004")
    loaded = step_folders.load(whole, report=words.append)
    assert loaded is not None and loaded.step == 2
    assert "has step 3, but the folder's name has 4" in words[0]


def test_an_extra_file_is_ignored_with_notice(whole: Path, words: list[str]) -> None:
    (whole / "step-00000003" / "notes.txt").write_text("mine")
    loaded = step_folders.load(whole, report=words.append)
    assert loaded is not None and loaded.step == 3
    assert words == ["checkpoint step-00000003: ignoring notes.txt, which its manifest does not list"]


def test_no_bit_of_a_small_checkpoint_can_change_unnoticed(whole: Path) -> None:
    """Every bit of every file, but for the white space of the manifest, which says nothing."""
    for name in ("policy.safetensors", "state.json"):
        path = whole / "step-00000003" / name
        content = path.read_bytes()
        for position in range(0, len(content) * 8, 5):
            damaged = bytearray(content)
            damaged[position // 8] ^= 1 << position % 8
            path.write_bytes(damaged)
            with pytest.raises(CheckpointError, match="do not match their checksum"):
                step_folders.verify(whole, 3)
        path.write_bytes(content)
    assert step_folders.verify(whole, 3).step == 3


def test_reading_changes_nothing(whole: Path, words: list[str]) -> None:
    before = {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in whole.rglob("*")}
    loaded = step_folders.load(whole, report=words.append)
    assert {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in whole.rglob("*")} == before
    assert loaded is not None and torch.equal(loaded.state["policy"]["tensors"]["count"], torch.tensor(3))
    assert words == []
