"""The clock that all arms share: it reads the time after every optimizer step, whoever takes it.

torch calls the hook after any `Optimizer.step()` of the process, so the runner and TRL are measured as they
are, without a line of theirs being changed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any


def peak_rss_bytes() -> int:
    """The largest resident set of this process so far (Linux)."""
    return _status("VmHWM")


def rss_bytes() -> int:
    """The resident set of this process now (Linux)."""
    return _status("VmRSS")


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {key}; this benchmark needs Linux")


def processor_s() -> float:
    """Processor seconds of this process and of those that it started and that still run (Linux)."""
    children = " ".join(file.read_text() for file in Path("/proc/self/task").glob("*/children")).split()
    return time.process_time() + sum(map(_of_child, children))


def _of_child(number: str) -> float:
    try:
        fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def since_start_s() -> float:
    """Seconds since the command that started this process was typed."""
    return time.time() - float(os.environ["BENCHMARK_STARTED"])


@dataclass(slots=True)
class Stamps:
    """Times after each optimizer step: seconds since the command, and processor seconds (`processor_s`)."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    peak_rss_bytes: int = 0
    imported_s: float = 0.0
    imported_cpu_s: float = 0.0
    laps: dict[str, list[float]] = field(default_factory=dict)  # processor seconds inside a function so far, per stamp
    _inside: dict[str, float] = field(default_factory=dict)

    def imported(self) -> None:
        """Everything is imported now."""
        self.imported_s, self.imported_cpu_s = since_start_s(), time.process_time()

    def watch(self) -> Stamps:
        """Stamp every optimizer step of this process from now on."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(lambda *_: self._stamp())
        return self

    def lap(self, name: str, owner: Any, function: str) -> None:
        """Count the processor seconds inside `owner.function` from now on."""
        inner = getattr(owner, function)

        @wraps(inner)
        def timed(*arguments: Any, **options: Any) -> Any:
            begin = processor_s()
            try:
                return inner(*arguments, **options)
            finally:
                self._inside[name] += processor_s() - begin

        self._inside[name], self.laps[name] = 0.0, []
        setattr(owner, function, timed)

    def _stamp(self) -> None:
        self.wall_s.append(since_start_s())
        self.cpu_s.append(processor_s())
        for name, seconds in self._inside.items():
            self.laps[name].append(seconds)
        self.peak_rss_bytes = peak_rss_bytes()


def write(path: Path, stamps: Stamps, losses: list[float], **more: Any) -> None:
    """The result that the harness reads."""
    record: Mapping[str, Any] = {
        "losses": losses,
        "wall_s": stamps.wall_s,
        "cpu_s": stamps.cpu_s,
        "peak_rss_bytes": stamps.peak_rss_bytes,
        "imported_s": stamps.imported_s,
        "imported_cpu_s": stamps.imported_cpu_s,
        "laps": stamps.laps,
        **more,
    }
    path.write_text(json.dumps(record))
