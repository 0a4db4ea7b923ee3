"""The folder that a run leaves: its paths, its birth under concurrent starts, `latest`, and its lock.

    outputs/<date>/<time>-<name>-<4 hex>/     outputs/latest → the newest run

Nothing here imports torch: the folder exists before it is loaded.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from runner.core import fsync_io
from runner.core.errors import EnvironmentProblem, StorageError
from runner.core.untrusted_text import check_yaml, parse_json

OUTPUTS = Path("outputs")
LOCK = ".lock"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The paths of one run, as rank 0, which leads it, sees them; the other ranks have a log of their own."""

    root: Path
    rank: int = 0
    service: str = ""  # samplers/0: of a process that serves the ranks

    def for_rank(self, rank: int) -> RunFolder:
        """The same folder for another rank of the job."""
        return RunFolder(self.root, rank)

    def for_sampler(self, index: int) -> RunFolder:
        """The same folder for a process that only samples."""
        return RunFolder(self.root, service=f"samplers/{index}")

    @property
    def ranks(self) -> Path:
        """ranks/N.log and ranks/N.stacks of the ranks from 1."""
        return self.root / "ranks"

    @property
    def samplers(self) -> Path:
        """samplers/N.json: where sampler N is reached; samplers/N.log: all that it said."""
        return self.root / "samplers"

    @property
    def members(self) -> Path:
        """members/N.json: who takes part on machine N, written every few seconds."""
        return self.root / "members"

    @property
    def engine(self) -> Path:
        """What an engine in this process reads from the disk; it goes with the process."""
        return self.root / f"{self.service or f'ranks/{self.rank}'}.engine"

    @property
    def journal(self) -> Path:
        """vN.jsonl: answers drawn with the weights after N steps, by a sampler that would not draw them again."""
        return self.root / "journal"

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
        """State, attempt, process, exit code, last error."""
        return self.root / "status.json"

    @property
    def metrics(self) -> Path:
        """One line per step."""
        return self.root / "metrics.jsonl"

    @property
    def evaluations(self) -> Path:
        """What `run eval` measured of the run: a line each time."""
        return self.root / "evaluations.jsonl"

    @property
    def samples(self) -> Path:
        """Some answers of each evaluation."""
        return self.root / "samples.jsonl"

    @property
    def report(self) -> Path:
        """The run as one HTML page."""
        return self.root / "report.html"

    @property
    def checkpoints(self) -> Path:
        """step-00000100/ and similar folders."""
        return self.root / "checkpoints"

    @property
    def has_checkpoint(self) -> bool:
        """Whether a checkpoint was committed; it may be damaged."""
        return any(self.checkpoints.glob("step-*/MANIFEST.json"))

    @property
    def export(self) -> Path:
        """A Hugging Face folder or a PEFT adapter."""
        return self.root / "export"

    def export_of(self, step: int) -> Path:
        """The export of a checkpoint that was requested by name."""
        return self.root / f"export-step-{step}"

    @property
    def log(self) -> Path:
        """The log with times; of a rank above 0, or a process that serves the ranks, its whole output."""
        if self.service:
            return self.root / f"{self.service}.log"
        return self.ranks / f"{self.rank}.log" if self.rank else self.root / "run.log"

    @property
    def attempts(self) -> Path:
        """attempts/N/: what was typed for the N-th attempt, and what it cut away or replaced."""
        return self.root / "attempts"

    @property
    def slurm(self) -> Path:
        """job.sh, job.json and <job>.log of a run that was submitted to Slurm."""
        return self.root / "slurm"

    @property
    def stacks(self) -> Path:
        """Every thread's stack, of steps that took too long."""
        return self.ranks / f"{self.rank}.stacks" if self.rank else self.root / "stacks.log"


def create_run_folder(name: str, outputs: Path = OUTPUTS) -> RunFolder:
    """Make a new run's folder. Raises StorageError where it cannot."""
    now = datetime.now()
    return RunFolder(make_unique(outputs / now.strftime("%Y-%m-%d"), f"{now.strftime('%H%M%S')}-{name}", "run folder"))


def make_unique(parent: Path, name: str, what: str, inside: str = ".") -> Path:
    """Make a folder `parent`/`name`-<4 hex> with a folder `inside`; returns its absolute path.

    Unique under concurrent starts.

    what: what the error calls it. Raises StorageError where it cannot.
    """
    root = parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        while True:
            root = parent / f"{name}-{secrets.token_hex(2)}"
            with suppress(FileExistsError):  # another start drew the same name in the same second: draw again
                root.mkdir()
                (root / inside).mkdir(exist_ok=True)
                return root.absolute()
    except OSError as error:
        raise StorageError(
            f"cannot make the {what} {root}: {error.strerror}; run in a folder that you can write to"
        ) from error


def refuse_used_folder(where: Path) -> None:
    """Raise EnvironmentProblem for a file, a folder with content, or a name that is no UTF-8 text."""
    try:
        str(where.absolute()).encode()
    except UnicodeEncodeError as error:
        text = "no UTF-8 text, so libraries cannot write there"
        raise EnvironmentProblem(f"the path of {where} is {text}; choose another --folder") from error
    if where.is_file():
        raise EnvironmentProblem(f"{where} is a file, but a run needs a folder; choose another --folder")
    if RunFolder(where).spec.exists():
        raise EnvironmentProblem(f"{where} has a run; to continue it: run resume {where}; or choose another --folder")
    try:
        # a run that died before it had a spec leaves its lock, and a file that it was about to rename
        others = [p.name for p in where.iterdir() if p.name != LOCK and not p.name.startswith(fsync_io.STAGED)]
    except OSError:
        others = []  # it is not there, or mkdir says what is wrong with it
    if others:
        text = f"{where} is not empty ({', '.join(sorted(others)[:3])}{', …' if len(others) > 3 else ''})"
        raise EnvironmentProblem(f"{text}, but a run needs its own folder; choose another --folder")


def claim_folder(where: Path) -> RunFolder:
    """The folder for a new run. Raises as `refuse_used_folder`, and StorageError if it cannot be made."""
    refuse_used_folder(where)
    try:
        where.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"cannot make the run folder {where}: {error.strerror}") from error
    return RunFolder(where.absolute())


def point_latest(folder: RunFolder, outputs: Path = OUTPUTS) -> None:
    """Make outputs/latest point to `folder`, atomically. Raises StorageError where it cannot."""
    latest, staged = outputs / "latest", outputs / f".latest-{secrets.token_hex(4)}"
    try:
        # Both resolved: the kernel reads a relative link from where outputs really is, not from where it is linked.
        staged.symlink_to(os.path.relpath(folder.root.resolve(), outputs.resolve()))
        os.replace(staged, latest)
    except OSError as error:
        staged.unlink(missing_ok=True)
        raise StorageError(
            f"cannot make {latest} a link to the run: {error.strerror}; does another file exist there?"
        ) from error


def is_latest(folder: RunFolder, outputs: Path = OUTPUTS) -> bool:
    """Whether outputs/latest points to `folder`."""
    return (outputs / "latest").resolve() == folder.root.resolve()


def find_run(where: str, outputs: Path = OUTPUTS) -> RunFolder:
    """The run called `where`: `latest`, or a folder. Raises EnvironmentProblem when it is no run."""
    root = outputs / "latest" if where == "latest" else Path(where)
    try:
        known = (root / "spec.yaml").is_file()
    except (OSError, ValueError) as error:  # a name no file can have, or a folder that may not be entered
        raise EnvironmentProblem(f"{root}: cannot be read ({error})") from error
    if not known:
        is_export = (root.parent / "spec.yaml").is_file()
        whose = f"; it is an export of the run {root.parent}: use the run" if is_export else ""
        raise EnvironmentProblem(
            f"{root} is not a run: it has no spec.yaml; expected `latest` or the folder of a run{whose}"
        )
    return RunFolder(root.resolve())


def find_trained_run(where: str, outputs: Path = OUTPUTS) -> tuple[RunFolder, RunFolder | None]:
    """The run called `where`, and the newest run if it was passed over because it has no checkpoint yet.

    `latest` then means the newest run that has one. Raises EnvironmentProblem when there is no run.
    """
    named = find_run(where, outputs)
    if where != "latest" or named.has_checkpoint:
        return named, None
    runs = (RunFolder(path.parent.resolve()) for path in sorted(outputs.glob("*/*/spec.yaml"), reverse=True))
    trained = next((run for run in runs if run.has_checkpoint), None)
    return (named, None) if trained is None else (trained, named)


def acquire_lock(folder: RunFolder) -> int:
    """Hold the run's folder for this process until it ends; the kernel frees it however that happens.

    Returns the open descriptor. Raises EnvironmentProblem if another process holds it, StorageError if it cannot.
    """
    try:
        handle = os.open(folder.root / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise StorageError(f"cannot write in {folder.root}: {error.strerror}") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(handle, 0)
        os.pwrite(handle, str(os.getpid()).encode(), 0)
    except BlockingIOError:
        owner = os.pread(handle, 64, 0).decode(errors="replace") or "unknown"
        os.close(handle)
        raise EnvironmentProblem(
            f"{folder.root}: process {owner} is running this job; wait for it or stop it"
        ) from None
    except OSError as error:
        os.close(handle)
        raise StorageError(f"cannot lock {folder.root}: {error.strerror}") from error
    return handle


def is_locked(folder: RunFolder) -> bool:
    """Whether a living process holds the run's folder. Raises EnvironmentProblem if that is unknown."""
    try:
        handle = os.open(folder.root / ".lock", os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise EnvironmentProblem(f"{folder.root / '.lock'} cannot be read: {error.strerror}") from error
    try:
        fcntl.flock(
            handle, fcntl.LOCK_SH | fcntl.LOCK_NB
        )  # shared: another process that only checks does not look like an owner
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


@contextmanager
def hold_lock(folder: RunFolder) -> Iterator[None]:
    """`lock` for the length of a block. Raises EnvironmentProblem if another process holds it."""
    handle = acquire_lock(folder)
    try:
        yield
    finally:
        os.close(handle)


def write_atomic(path: Path, text: str) -> None:
    """Replace `path` by `text` so that a reader, or a crash, sees the old or the new and nothing else.

    Raises StorageError where it cannot; the old file is then untouched and nothing is left beside it.
    """
    try:
        fsync_io.atomic_write(path, text.encode("utf-8"))
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}") from error


def write_json(path: Path, value: Any) -> None:
    """`write_atomic` of readable JSON; NaN or infinity is a ValueError."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False, default=str) + "\n"
    # A file name that is not UTF-8 holds lone surrogates; as \udcXX they are legal JSON.
    write_atomic(path, text.encode("utf-8", "backslashreplace").decode("utf-8"))


def read_mapping(path: Path, *, must_exist: bool = False) -> dict[str, Any]:
    """The mapping in a JSON or YAML file; empty where there is no file, unless there must be one.

    Raises EnvironmentProblem where it cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            return dict(parse_json(text))
        check_yaml(text)
        return dict(yaml.safe_load(text))
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        if isinstance(error, FileNotFoundError) and not must_exist:
            return {}
        raise EnvironmentProblem(f"{path} cannot be read: {error}") from error


def display_path(path: Path) -> str:
    """The path as the user would type it: relative to the current folder if it lies below."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
