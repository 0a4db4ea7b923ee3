"""Real shortages on a real, tiny file system: no bytes, no inodes, no large files, read-only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMESPACE = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--map-root-user"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    disk = tmp_path_factory.mktemp("disk")
    try:
        probe = subprocess.run([*NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", str(disk)], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no `unshare` on this machine: a full disk cannot be made")
    if probe.returncode:
        pytest.skip(f"no file system can be mounted here: {probe.stderr.strip()}")
    script = [sys.executable, str(Path(__file__).with_name("small_disk.py")), str(disk)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([*NAMESPACE, *script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["case"]: line for line in lines}


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("bytes_short", "not enough space; needed 4194"),  # twice 2 MiB, and state.json
        ("bytes_short_in_the_background", "not enough space; needed 4194"),
        ("filled_meanwhile", "the disk is full"),
        ("inodes_short", "the disk has no inodes for more files"),
        ("file_size_limit", "larger than this shell (ulimit -f)"),
        ("read_only", "Read-only file system"),
    ],
)
def test_a_shortage_is_said_in_words_and_harms_nothing(
    results: dict[str, dict[str, object]], case: str, says: str
) -> None:
    result = results[case]
    assert result["error"] == "StorageError", result
    assert says in str(result["message"]), result
    assert "bytes (" in str(result["message"]) and "free " in str(result["message"])
    assert result["left"] == ["step-00000001"], "the staging folder is gone, the one before is there"
    assert result["newest"] == 1
