"""The folder that a run leaves: its paths, its birth under concurrent starts, `latest`, and its lock.

    outputs/<date>/<time>-<name>-<4 hex>/     outputs/latest → the newest run

Nothing here imports torch: the folder exists before it is loaded.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from runner.errors import EnvironmentProblem, StorageError

OUTPUTS = Path("outputs")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The paths of one run."""

    root: Path

    @property
    def spec(self) -> Path:
        """The resolved job spec, which runs again by itself."""
        return self.root / "spec.yaml"

    @property
    def overrides(self) -> Path:
        """What was typed, and who set each value."""
        return self.root / "overrides.yaml"

    @property
    def manifest(self) -> Path:
        """Code, versions, device, decisions, environment."""
        return self.root / "manifest.json"

    @property
    def status(self) -> Path:
        """State, step, attempt, exit code."""
        return self.root / "status.json"

    @property
    def metrics(self) -> Path:
        """One line per step."""
        return self.root / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        """Some answers of each evaluation."""
        return self.root / "samples.jsonl"

    @property
    def checkpoints(self) -> Path:
        """step-00000100/ and its like."""
        return self.root / "checkpoints"

    @property
    def export(self) -> Path:
        """A Hugging Face folder or a PEFT adapter."""
        return self.root / "export"

    @property
    def log(self) -> Path:
        """What was printed, with times."""
        return self.root / "run.log"

    @property
    def attempts(self) -> Path:
        """attempts/N/: what the N-th resume cut away."""
        return self.root / "attempts"


def create(name: str, outputs: Path = OUTPUTS) -> RunFolder:
    """Make a new run's folder, unique under concurrent starts. Raises StorageError where it cannot."""
    now = datetime.now()
    day = outputs / now.strftime("%Y-%m-%d")
    while True:
        root = day / f"{now.strftime('%H%M%S')}-{name}-{secrets.token_hex(2)}"
        try:
            root.mkdir(parents=True)
            return RunFolder(root.absolute())
        except FileExistsError:
            continue
        except OSError as error:
            raise StorageError(
                f"cannot make the run folder {root}: {error.strerror}; run from a folder you can write to"
            ) from error


def point_latest(folder: RunFolder, outputs: Path = OUTPUTS) -> None:
    """Make outputs/latest point to `folder`, atomically."""
    link = outputs / f".latest-{secrets.token_hex(4)}"
    link.symlink_to(os.path.relpath(folder.root, outputs))
    os.replace(link, outputs / "latest")


def find(where: str, outputs: Path = OUTPUTS) -> RunFolder:
    """The run called `where`: `latest`, or a folder. Raises EnvironmentProblem when it is no run."""
    root = outputs / "latest" if where == "latest" else Path(where)
    if not (root / "spec.yaml").is_file():
        raise EnvironmentProblem(f"{root}: no run there (no spec.yaml); `latest` or the folder of a run is expected")
    return RunFolder(root.resolve())


def lock(folder: RunFolder) -> int:
    """Hold the run's folder for this process until it ends; the kernel frees it however that happens."""
    handle = os.open(folder.root / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(handle, 64).decode(errors="replace") or "unknown"
        os.close(handle)
        raise EnvironmentProblem(
            f"{folder.root}: process {owner} is running this job; wait for it or stop it"
        ) from None
    os.ftruncate(handle, 0)
    os.write(handle, str(os.getpid()).encode())
    return handle


def write_atomic(path: Path, text: str) -> None:
    """Replace `path` by `text` so that a reader, or a crash, sees the old or the new and nothing else."""
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    with staged.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(staged, path)


def write_json(path: Path, value: Any) -> None:
    """`write_atomic` of readable JSON."""
    write_atomic(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False, default=str) + "\n")


def shown(path: Path) -> str:
    """The path as the user would type it: relative to the current folder if it lies below."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
