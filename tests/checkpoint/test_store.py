"""Saving, keeping and refusing: what a run sees of its checkpoints."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from runner.checkpoint import format, step_folders
from runner.checkpoint import step_folders as writing
from runner.checkpoint.config import SafetensorsConfig
from runner.checkpoint.store import CheckpointStore
from runner.core.errors import CheckpointError, SpecError, StorageError, TrainingDiverged

Open = Callable[..., CheckpointStore]
StateOf = Callable[[int], dict[str, dict[str, Any]]]


def digests(root: Path) -> dict[str, str]:
    return {
        str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest() for p in root.rglob("*") if p.is_file()
    }


def assert_is(loaded: step_folders.LoadedCheckpoint | None, step: int) -> None:
    assert loaded is not None and loaded.step == step
    assert torch.equal(loaded.state["policy"]["tensors"]["weight"], torch.arange(12.0).reshape(3, 4) + step)
    assert loaded.state["algorithm"] == {"seen": [step, "items"]}


def test_no_checkpoint_is_none_and_makes_no_folder(open_store: Open, root: Path) -> None:
    fresh = open_store()
    assert (fresh.load(), fresh.steps(), fresh.best()) == (None, [], None)
    assert not root.exists()
    root.mkdir(parents=True)
    assert fresh.load() is None


def test_the_layout(open_store: Open, state_of: StateOf, root: Path) -> None:
    folder = open_store().save(100, state_of(100), {"train/loss": 0.5, "eval/none": float("nan")})
    assert folder == root / "step-00000100"
    assert sorted(p.name for p in folder.iterdir()) == ["MANIFEST.json", "policy.safetensors", "state.json"]
    assert [p.name for p in root.iterdir()] == ["step-00000100"]
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    assert manifest["schema"] == 2 and manifest["step"] == 100 and manifest["metrics"]["train/loss"] == 0.5
    for name, record in manifest["files"].items():
        content = (folder / name).read_bytes()
        assert record == {"bytes": len(content), "xxh128": xxhash.xxh3_128_hexdigest(content)}
    modes = {p.stat().st_mode & 0o777 for p in folder.iterdir()}
    assert len(modes) == 1, "a colleague can read all of a checkpoint or none of it"


def test_nothing_is_read_back(open_store: Open) -> None:
    def read_bytes() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before = read_bytes()
    open_store(keep=1).save(1, {"policy": {"tensors": {"w": torch.ones(2_000_000)}}}, {})
    assert read_bytes() - before < 1_000_000


def test_a_checkpoint_of_schema_1_is_read_and_verified(open_store: Open, state_of: StateOf, words: list[str]) -> None:
    for step in (1, 2):
        folder = open_store().save(step, state_of(step), {"loss": 0.5})
        body = json.loads((folder / "MANIFEST.json").read_text()) | {"schema": 1}
        del body["digest"]
        for name, record in body["files"].items():
            del record["xxh128"]
            record["sha256"] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        text = json.dumps(body | {"digest": format._manifest_digest(body)})
        (folder / "MANIFEST.json").write_text(text)
    assert_is(open_store().load(), 2)
    with (folder / "policy.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    assert_is(open_store().load(), 1)
    assert words == ["checkpoint step-00000002: policy.safetensors: its contents do not match their checksum; "
                     "trying the previous one"]  # fmt: skip


def test_the_lines_of_its_steps_are_on_the_disk_before_a_checkpoint_is(
    root: Path, state_of: StateOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, os.rename

    def noted_fsync(handle: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        fsync(handle)

    def noted_rename(old: Path, new: Path) -> None:
        events.append(f"rename to {Path(new).name}")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    lines = tmp_path / "metrics.jsonl"
    lines.write_text("{}\n")
    beside = (lines, tmp_path / "not exist yet")
    CheckpointStore(SafetensorsConfig(), root=root, report=print, beside=beside).save(1, state_of(1), {})
    assert events.index("metrics.jsonl") < events.index("rename to step-00000001")


def test_the_newest_comes_back_and_any_other_by_its_step(open_store: Open, state_of: StateOf) -> None:
    writer = open_store(keep=3)
    for step in (5, 10, 15):
        writer.save(step, state_of(step), {"train/loss": step / 2})
    assert_is(open_store().load(), 15)
    assert_is(open_store().load(5), 5)
    loaded = open_store().load(10)
    assert loaded is not None and loaded.metrics == {"train/loss": 5.0}
    with pytest.raises(CheckpointError, match="no checkpoint of step 7; there are: 5, 10, 15"):
        open_store().load(7)


def test_loaded_tensors_can_be_changed_without_changing_the_file(open_store: Open, state_of: StateOf) -> None:
    open_store().save(1, state_of(1), {})
    loaded = open_store().load()
    assert loaded is not None
    weight = loaded.state["policy"]["tensors"]["weight"]
    assert weight.device.type == "cpu"
    weight.zero_()
    assert_is(open_store().load(), 1)


def test_loaded_tensors_do_not_live_in_the_file(open_store: Open, root: Path) -> None:
    """The optimizer keeps some of them, and the checkpoint they come from is deleted later."""
    open_store().save(1, {"policy": {"tensors": {"w": torch.ones(100_000)}}}, {})
    loaded = open_store().load()
    with (root / "step-00000001" / "policy.safetensors").open("r+b") as file:
        file.write(bytes(400_000))
    assert loaded is not None and bool((loaded.state["policy"]["tensors"]["w"] == 1).all())


@pytest.mark.parametrize(
    "name", ["step-10.bak", "step-00000010.bak", "xstep-00000010", "step-1", "step-0000000010", "step-00000010 "]
)
def test_only_exact_names_count(open_store: Open, state_of: StateOf, root: Path, name: str) -> None:
    writer = open_store()
    folder = writer.save(10, state_of(10), {})
    folder.rename(root / name)
    (root / "step-00000099").write_text("a file")
    (root / "step-00000098").symlink_to(root / name)
    assert writer.steps() == []
    assert writer.load() is None


def test_the_newest_and_the_best_are_kept(open_store: Open, state_of: StateOf) -> None:
    scores = {1: 0.1, 2: 0.9, 3: 0.5, 4: 0.9, 5: 0.2, 6: 0.3}
    for step, score in scores.items():  # a new process each time: what is best survives a restart
        metrics = {"eval/x": score} if step != 5 else {}
        open_store(keep=2, best="eval/x", best_mode="max").save(step, state_of(step), metrics)
    assert open_store().steps() == [2, 5, 6], "of the equals 2 and 4 the older"
    assert open_store(best="eval/x", best_mode="max").best() == 2
    assert open_store().best() is None
    assert open_store(best="eval/other", best_mode="max").best() is None


def test_only_evaluations_of_this_attempt_say_that_the_best_is_not_measured(
    open_store: Open, state_of: StateOf
) -> None:
    open_store().save(1, state_of(1), {"eval/x": 0.5})
    resumed = open_store(best="eval/set/x", best_mode="max")
    resumed.save(2, state_of(2), {"train/loss": 0.5})
    assert (resumed.steps(), resumed.best()) == ([1, 2], None)
    with pytest.raises(SpecError, match="eval/set/x is not measured; this job measures eval/x"):
        resumed.save(3, state_of(3), {"eval/x": 0.5})


def test_the_least_can_be_the_best(open_store: Open, state_of: StateOf) -> None:
    writer = open_store(keep=1, best="loss", best_mode="min")
    for step, loss in {1: 3.0, 2: 1.0, 3: 2.0, 4: float("nan")}.items():
        writer.save(step, state_of(step), {"loss": loss})
    assert (writer.steps(), writer.best()) == ([2, 4], 2)


def test_saving_a_step_again_is_an_error_that_says_so(open_store: Open, state_of: StateOf, root: Path) -> None:
    open_store().save(3, state_of(3), {})
    before = digests(root)
    with pytest.raises(CheckpointError, match=r"the checkpoint of step 3 exists already; nothing is overwritten"):
        open_store().save(3, state_of(4), {})
    with pytest.raises(CheckpointError, match=r"step 2 would be older than that of step 3"):
        open_store().save(2, state_of(2), {})
    assert digests(root) == before


def test_a_damaged_one_of_the_same_step_is_set_aside(
    open_store: Open, state_of: StateOf, root: Path, words: list[str]
) -> None:
    """After falling back from a damaged step 6 to step 3, the run arrives at step 6 again."""
    writer = open_store()
    writer.save(3, state_of(3), {})
    (writer.save(6, state_of(6), {}) / "state.json").write_text("{}")
    resumed = open_store()
    assert_is(resumed.load(), 3)
    resumed.save(6, state_of(6), {})
    assert_is(open_store().load(), 6)
    assert any("the damaged step-00000006 was renamed to damaged-step-00000006-" in w for w in words)
    assert len(list(root.glob("damaged-*"))) == 1


def test_damaged_ones_never_push_the_last_whole_one_out(open_store: Open, state_of: StateOf, words: list[str]) -> None:
    writer = open_store(keep=3)
    for step in (1, 2, 3):
        writer.save(step, state_of(step), {})
    for step in (2, 3):
        (writer._root / step_folders.folder_name(step) / "policy.safetensors").write_bytes(b"")
    open_store(keep=2).save(4, state_of(4), {})
    assert open_store().steps() == [1, 2, 3, 4], "two whole ones stay: 1 and 4; what is damaged is left alone"
    assert sum("not removed" in w for w in words) == 2


def test_what_is_not_finite_is_not_committed(open_store: Open, state_of: StateOf, root: Path) -> None:
    writer = open_store()
    writer.save(1, state_of(1), {})
    before = digests(root)
    poisoned = state_of(2)
    poisoned["policy"]["tensors"]["weight"][1, 1] = float("nan")
    with pytest.raises(TrainingDiverged, match="the tensor weight has NaN or infinity"):
        writer.save(2, poisoned, {})
    assert digests(root) == before


FAILPOINTS = re.findall(r'failpoint\("([\w.]+)"\)', Path(writing.__file__).read_text())


@pytest.mark.parametrize("code", ["ENOSPC", "EIO"])
@pytest.mark.parametrize("point", FAILPOINTS)
def test_a_failing_disk_is_said_in_words_and_harms_nothing(
    open_store: Open, state_of: StateOf, root: Path, monkeypatch: pytest.MonkeyPatch, point: str, code: str
) -> None:
    writer = open_store(keep=1)
    writer.save(1, state_of(1), {})
    before = digests(root)
    monkeypatch.setenv("RUNNER_FAILPOINT", f"{point}:{code}")
    with pytest.raises(StorageError) as caught:
        writer.save(2, state_of(2), {})
    monkeypatch.delenv("RUNNER_FAILPOINT")
    reason = "the disk is full" if code == "ENOSPC" else os.strerror(errno.EIO)
    assert re.search(rf"checkpoint of step 2 in .*{reason}; needed \d+ bytes .*, free \d+ bytes", str(caught.value))
    assert not list(root.glob(".staging-*"))
    if point != "checkpoint.in_trash":  # by then the new one is verified, and the old one on its way out
        assert before.items() <= digests(root).items()
    loaded = open_store().load()
    assert loaded is not None
    assert_is(loaded, loaded.step)


def test_a_place_where_no_folder_can_be_made_is_said_in_words(open_store: Open, state_of: StateOf, root: Path) -> None:
    root.parent.rmdir()
    root.parent.write_text("a file where the run's folder should be")
    with pytest.raises(StorageError, match=r"checkpoint of step 1 in .*: Not a directory; needed"):
        open_store().save(1, state_of(1), {})


def test_a_run_folder_that_was_deleted_is_not_made_again(open_store: Open, state_of: StateOf, root: Path) -> None:
    store = open_store()
    store.save(1, state_of(1), {})
    shutil.rmtree(root.parent)
    with pytest.raises(StorageError, match=r"checkpoint of step 2: .*/run was deleted or moved.*start the run again"):
        store.save(2, state_of(2), {})
    assert not root.parent.exists()


def test_too_little_space_is_noticed_before_anything_is_written(
    open_store: Open, state_of: StateOf, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runner.core.fsync_io.free_bytes", lambda folder: 100)
    with pytest.raises(StorageError, match=r"not enough space; needed \d+ bytes .* free 100 bytes .*run resume"):
        open_store().save(1, state_of(1), {})
    assert list(root.iterdir()) == []


def test_leftovers_go_when_a_writer_saves_not_when_a_reader_looks(
    open_store: Open, state_of: StateOf, root: Path, words: list[str]
) -> None:
    open_store().save(1, state_of(1), {})
    left = [root / ".staging-00000002-0123abcd", root / ".trash-00000000-0123abcd"]
    for folder in left:
        folder.mkdir()
        (folder / "policy.safetensors").write_bytes(b"x")
    (root / ".nfs0001").write_text("not ours")
    assert_is(open_store().load(), 1)
    assert all(folder.exists() for folder in left)
    writer = open_store()
    for step in (2, 3):
        writer.save(step, state_of(step), {})
    assert words == [f"checkpoints: removed {p.name}, left by a process that died" for p in left]
    assert not any(folder.exists() for folder in left)
    assert (root / ".nfs0001").exists()


def test_a_newer_schema_is_neither_used_nor_skipped_nor_deleted(
    open_store: Open, state_of: StateOf, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = open_store(keep=1)
    writer.save(1, state_of(1), {})
    monkeypatch.setattr("runner.checkpoint.format.SCHEMA", 3)
    newer = root / "step-00000002"
    described = format.read_manifest(root / "step-00000001")
    (root / "step-00000001").rename(newer)
    changed = format.Manifest(2, described.written, {}, described.files, schema=3)
    (newer / "MANIFEST.json").write_bytes(format.encode_manifest(changed))
    monkeypatch.setattr("runner.checkpoint.format.SCHEMA", 2)
    with pytest.raises(CheckpointError, match="schema 3; this runner reads up to 2: install the newer version"):
        open_store().load()
    open_store(keep=1).save(3, state_of(3), {})
    open_store(keep=1).save(4, state_of(4), {})
    assert open_store().steps() == [2, 4]
