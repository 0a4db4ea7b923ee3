"""Runs on machines that lack something: each ends done, or with an error that names the cause."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from runner.cli.main import main
from runner.trainer.callbacks import DeviceStats
from tests.small import UNJUDGED

SMALL = (*UNJUDGED, "steps=2", "checkpoint.every=1")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts and user numbers need root")


def shell(script: str, cwd: Path, *words: str) -> tuple[int, str]:
    """Exit code and output of a run below a shell that first runs `script`."""
    command = ["sh", "-c", f'{script}; exec "$@"', "sh", sys.executable, "-m", "runner", *words]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


def test_a_current_folder_that_was_deleted_is_said(tmp_path: Path) -> None:
    code, said = shell("mkdir x; cd x; rmdir ../x", tmp_path, "list")
    assert (code, said) == (2, "error: the current folder was deleted; change to another one: cd FOLDER\n")


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't start new thread")], ids=["memory", "threads"])
def test_a_machine_without_memory_or_threads_is_no_bug(
    error: Exception, workdir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(DeviceStats, "on_start", fail)
    assert main(list(SMALL)) == 75
    said = capsys.readouterr().err
    assert "this process gets no more memory or threads" in said and "ulimit -v" in said and "bug" not in said


def run_with_failing_fsync(number: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run the demo; the fsync with this number fails."""
    real, calls = os.fsync, list[int]()

    def fsync(handle: int) -> None:
        calls.append(handle)
        if len(calls) == number:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    return main(list(SMALL))


@pytest.mark.parametrize("number", [1, 4, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3, *range(5, 13)))])
def test_a_failed_fsync_is_a_storage_error(
    number: int, workdir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_with_failing_fsync(number, monkeypatch) == 7
    said = capsys.readouterr().err
    assert "Input/output error" in said and "Traceback" not in said and "bug" not in said


@pytest.mark.slow
@pytest.mark.parametrize("mask", [0o077, 0o000])
def test_a_run_keeps_the_umask_and_continues(mask: int, workdir: Path) -> None:
    before = os.umask(mask)
    try:
        assert main(list(SMALL)) == 0
        assert main(["resume", "latest", "steps=3"]) == 0
    finally:
        os.umask(before)
    assert Path("outputs/latest/spec.yaml").stat().st_mode & 0o777 == 0o666 & ~mask


@pytest.mark.slow
@pytest.mark.parametrize("script", ["unset HOME", "export HOME=/nonexistent/x", "ulimit -n 64", "ulimit -v 8000000"])
def test_a_run_needs_no_home_and_few_files(script: str, tmp_path: Path) -> None:
    code, said = shell(script, tmp_path, *SMALL)
    assert code == 0, said


@pytest.mark.slow
@needs_root
def test_two_ranks_need_no_shared_memory(tmp_path: Path) -> None:
    ranks = ("parallelism=ddp", "launch.devices=2", "device.threads=1")
    inside = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o ro none /dev/shm && exec "$@"', "sh"]
    command = [*inside, sys.executable, "-m", "runner", *SMALL, *ranks]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"this machine mounts nothing: {done.stderr}")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@needs_root
def test_a_full_cache_is_a_storage_error_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 5000)
    (tmp_path / "cache").mkdir()
    data = ("data=file", f"data.path={tmp_path}/rows.jsonl", "model=tiny")
    words = [word for word in SMALL if not word.startswith("data.")]
    mount = f'mount -t tmpfs -o size=64k none {tmp_path}/cache && RUNNER_CACHE={tmp_path}/cache exec "$@"'
    command = ["unshare", "-m", "sh", "-c", mount, "sh", sys.executable, "-m", "runner", *words, *data]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"this machine mounts nothing: {done.stderr}")
    assert done.returncode == 7 and "cannot write the token cache" in done.stderr, done.stderr
    assert "data.cache=false" in done.stderr
