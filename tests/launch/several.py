"""A job of several ranks as its user sees it: started in a folder of its own, watched, disturbed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runner.tracker.text import MACHINE_METRICS
from tests.command import Command

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 300.0
DDP = ("parallelism=ddp",)


class Job:
    """A command in the folder `cwd`, and what it leaves there."""

    def __init__(self, cwd: Path, name: str = "printed.txt") -> None:
        self.cwd, self.printed = cwd, cwd / name
        self.latest = cwd / "outputs" / "latest"

    def start(
        self,
        *words: str,
        program: tuple[str, ...] = ("-m", "runner"),
        before: tuple[str, ...] = (),
        **environment: str,
    ) -> subprocess.Popen[bytes]:
        """Start it; what it prints goes to the end of `printed`. before: a command that becomes this one."""
        with self.printed.open("ab") as output:
            return subprocess.Popen(
                [*before, sys.executable, *program, *words],
                cwd=self.cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment,
            )

    def run(self, *words: str, code: int = 0, **environment: str) -> str:
        """Run it to its end, which must be with `code`; returns all that was printed."""
        process = self.start(*words, **environment)
        assert process.wait(DEADLINE_S) == code, self.said()
        return self.said()

    def said(self) -> str:
        return self.printed.read_text()

    def steps(self) -> int:
        """Finished steps."""
        path = self.latest / "metrics.jsonl"
        return path.read_bytes().count(b'"train/loss"') if path.exists() else 0

    def curve(self) -> list[dict[str, Any]]:
        """metrics.jsonl without what no two runs share."""
        rows = [json.loads(line) for line in (self.latest / "metrics.jsonl").read_text().splitlines()]
        return [{k: v for k, v in row.items() if not k.startswith(MACHINE_METRICS)} for row in rows]

    def weights(self, step: int) -> bytes:
        """A checkpoint's parameters and optimizer state."""
        return (self.latest / "checkpoints" / f"step-{step:08d}" / "policy.safetensors").read_bytes()

    def status(self) -> dict[str, Any]:
        return dict(json.loads((self.latest / "status.json").read_text()))

    def pids(self) -> list[int]:
        """The ranks' processes, as the manifest says."""
        return [rank["pid"] for rank in json.loads((self.latest / "manifest.json").read_text())["ranks"]]


def wait_until(happened: Callable[[], bool], process: subprocess.Popen[bytes] | Command) -> None:
    """Return when `happened`; the process must not end before."""
    end = time.monotonic() + DEADLINE_S
    while not happened():
        assert process.poll() is None, "it ended by itself"
        assert time.monotonic() < end, "nothing happened before the deadline"
        time.sleep(0.01)


def alive(pids: list[int]) -> list[int]:
    """Those that still run; a zombie does not."""
    return [pid for pid in pids if state(pid) not in ("", "Z", "X")]


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def gone(pids: list[int], within_s: float = 60.0) -> bool:
    """Whether all of them end in that time."""
    end = time.monotonic() + within_s
    while alive(pids) and time.monotonic() < end:
        time.sleep(0.05)
    return not alive(pids)
