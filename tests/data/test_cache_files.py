"""Checksums of data files: computed once, and again as soon as a file may be another one."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from pathlib import Path

import pytest

from runner.core.errors import StorageError
from runner.data import cache_files
from runner.data.cache_files import cache_lock, file_digest


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were read for a checksum; every file is large enough for a note."""
    found: list[Path] = []

    def sha256(path: Path) -> str:
        found.append(path)
        return hashlib.sha256(path.read_bytes()).hexdigest()

    monkeypatch.setattr(cache_files, "sha256", sha256)
    monkeypatch.setattr(cache_files, "NOTED_BYTES", 1)
    return found


def old_file(path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> Path:
    path.write_bytes(content)
    monkeypatch.setattr(cache_files, "SETTLED_S", -1.0)
    return path


def test_a_file_is_read_once_by_all_ranks_and_again_when_it_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: list[Path]
) -> None:
    path, notes = old_file(tmp_path / "a.jsonl", b"one", monkeypatch), tmp_path / "notes"
    ranks = [threading.Thread(target=file_digest, args=(path, notes)) for _ in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert file_digest(path, notes) == hashlib.sha256(b"one").hexdigest() and read == [path]
    before = path.stat()
    path.write_bytes(b"two")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # the same size and time of change
    assert file_digest(path, notes) == hashlib.sha256(b"two").hexdigest() and len(read) == 2


def test_a_note_of_a_file_that_may_still_change_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: list[Path]
) -> None:
    monkeypatch.setattr(cache_files, "SETTLED_S", 600.0)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"one")
    assert [file_digest(path, tmp_path / "notes") for _ in range(2)] == [hashlib.sha256(b"one").hexdigest()] * 2
    assert len(read) == 2


def test_a_damaged_note_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: list[Path]) -> None:
    path, notes = old_file(tmp_path / "a.jsonl", b"one", monkeypatch), tmp_path / "notes"
    digest = file_digest(path, notes)
    [note] = [file for file in notes.iterdir() if not file.name.startswith(".")]
    note.write_text("damaged")
    assert file_digest(path, notes) == digest and len(read) == 2


def test_a_cache_that_cannot_be_written_is_an_error(tmp_path: Path, read: list[Path]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"one")
    with pytest.raises(StorageError, match="RUNNER_CACHE"):
        file_digest(path, path / "notes")


def test_a_free_lock_is_no_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cache_files, "WAIT_S", 0.0)
    caplog.set_level(logging.INFO, "runner")
    for _ in range(50):
        with cache_lock(tmp_path / "rows"):
            pass
    assert caplog.messages == []


def test_a_long_wait_for_another_process_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cache_files, "WAIT_S", 0.01)
    caplog.set_level(logging.INFO, "runner")
    entered = threading.Event()

    def wait() -> None:
        with cache_lock(tmp_path / "rows"):
            entered.set()

    other = threading.Thread(target=wait)
    with cache_lock(tmp_path / "rows"):
        other.start()
        while not caplog.messages:
            time.sleep(0.01)
        assert not entered.is_set()
    other.join()
    assert entered.is_set() and caplog.messages == [f"waiting for another process, which writes {tmp_path / 'rows'}"]
