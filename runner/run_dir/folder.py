"""The folder of a run: its paths, its creation, `latest`, and its lock.

    outputs/<date>/<time>-<name>-<4 hex>/     outputs/latest → the newest run

Nothing here imports torch: the folder exists before it is loaded.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, overload

import yaml

from runner.core import file_lock, fsync_io
from runner.core.errors import DataError, EnvironmentProblem, SpecError, StorageError
from runner.core.file_lock import FileLock
from runner.core.untrusted_text import check_yaml, parse_json
from runner.spec.saved_spec import SavedSpec, translate_spec

log = logging.getLogger("runner")
OUTPUTS = Path("outputs")
LOCK = ".lock"
LATEST, LATEST_TEXT = "latest", "latest.txt"
UNLINKABLE = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP)  # where a disk has no symbolic links


class SubPath:
    """An attribute of a folder's class: the path of this name below the folder's `root`."""

    def __init__(self, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, folder: None, owner: type[RunFolder]) -> SubPath: ...

    @overload
    def __get__(self, folder: RunFolder, owner: type[RunFolder]) -> Path: ...

    def __get__(self, folder: RunFolder | None, owner: type[RunFolder]) -> Path | SubPath:
        return self if folder is None else folder.root / self.name


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The paths of one run. Each rank, and each process that serves ranks, has its own log."""

    root: Path
    rank: int = 0
    service: str = ""  # samplers/0: of a process that serves the ranks

    ranks = SubPath("ranks")  # ranks/N.log and ranks/N.stacks of the ranks from 1
    samplers = SubPath("samplers")  # samplers/N.json: where sampler N is reached; samplers/N.log: its output
    members = SubPath("members")  # members/N.json: the processes on machine N, written every few seconds
    journal = SubPath("journal")  # vN.jsonl: rollouts with the weights after N steps, if sampling is not repeatable
    spec = SubPath("spec.yaml")  # the resolved job spec, which runs again by itself
    overrides = SubPath("overrides.yaml")  # what was typed, and who set each value
    manifest = SubPath("manifest.json")  # code, versions, device, decisions, environment
    status = SubPath("status.json")  # state, attempt, process, exit code, last error
    metrics = SubPath("metrics.jsonl")  # one line per step
    evaluations = SubPath("evaluations.jsonl")  # what `run eval` measured of the run: a line each time
    samples = SubPath("samples.jsonl")  # some answers of each evaluation
    report = SubPath("report.html")  # the run as one HTML page
    checkpoints = SubPath("checkpoints")  # step-00000100/ and similar folders
    export = SubPath("export")  # a Hugging Face folder or a PEFT adapter
    attempts = SubPath("attempts")  # attempts/N/: what was typed for the N-th attempt, and what it cut away or replaced
    user_files = SubPath("user_files")  # the user's files (reward functions, chat templates) as the run began
    slurm = SubPath("slurm")  # job.sh, job.json and <job>.log of a run that was submitted to Slurm

    def for_rank(self, rank: int) -> RunFolder:
        """The same folder for another rank of the job."""
        return RunFolder(self.root, rank)

    def for_sampler(self, index: int) -> RunFolder:
        """The same folder for a process that only samples."""
        return RunFolder(self.root, service=f"samplers/{index}")

    @property
    def engine(self) -> Path:
        """What an engine in this process reads from the disk; it goes with the process."""
        return self.root / f"{self.service or f'ranks/{self.rank}'}.engine"

    @property
    def has_checkpoint(self) -> bool:
        """Whether a checkpoint was committed; it may be damaged."""
        return bool(self.saved_steps)

    @property
    def saved_steps(self) -> set[int]:
        """The steps whose checkpoint was committed and not deleted since."""
        names = (path.parent.name.removeprefix("step-") for path in self.checkpoints.glob("step-*/MANIFEST.json"))
        return {int(name) for name in names if name.isdecimal()}

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
    def stacks(self) -> Path:
        """Every thread's stack, of steps that took too long."""
        return self.ranks / f"{self.rank}.stacks" if self.rank else self.root / "stacks.log"

    def next_step_hint(self, first: int) -> str:
        """What to do about a run without a checkpoint, whose first one comes after the step `first`."""
        known, resume = read_mapping(self.status), f"continue it with: run resume {display_path(self.root)}"
        if known.get("state") == "running":
            return f"if it is running, the first one comes after step {first}; if it was killed, {resume}"
        if known.get("exit_code") in (SpecError.exit_code, DataError.exit_code):
            return f"it failed: {str(known.get('error')).splitlines()[0]}; correct that and start a new run"
        return resume


def create_run_folder(name: str, outputs: Path = OUTPUTS) -> RunFolder:
    """Create a new run's folder. Raises StorageError if it cannot."""
    now = datetime.now()
    return RunFolder(make_unique(outputs / now.strftime("%Y-%m-%d"), f"{now.strftime('%H%M%S')}-{name}", "run folder"))


def make_unique(parent: Path, name: str, what: str, inside: str = ".") -> Path:
    """Create a unique folder `parent`/`name`-<4 hex> with a folder `inside`; returns its absolute path.

    what: its name in an error message. Raises StorageError if it cannot be created.
    """
    remedy = "; run in a folder that you can write to"
    with fsync_io.storage_errors(f"cannot create the {what} {parent / name}", remedy):
        parent.mkdir(parents=True, exist_ok=True)
        while True:
            root = parent / f"{name}-{secrets.token_hex(2)}"
            with suppress(FileExistsError):  # a concurrent start has the same name: try another
                root.mkdir()
                (root / inside).mkdir(exist_ok=True)
                return root.absolute()


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
        # a run that was killed before it wrote its spec leaves its lock and a staged file
        others = [p.name for p in where.iterdir() if not p.name.startswith((LOCK, fsync_io.STAGED))]
    except OSError:
        others = []  # it does not exist, or mkdir reports the error
    if others:
        text = f"{where} is not empty ({', '.join(sorted(others)[:3])}{', …' if len(others) > 3 else ''})"
        raise EnvironmentProblem(f"{text}, but a run needs its own folder; choose another --folder")


def claim_folder(where: Path) -> RunFolder:
    """The folder for a new run. Raises as `refuse_used_folder`, and StorageError if it cannot be made."""
    refuse_used_folder(where)
    with fsync_io.storage_errors(f"cannot create the run folder {where}"):
        where.mkdir(parents=True, exist_ok=True)
    return RunFolder(where.absolute())


def point_latest(folder: RunFolder, outputs: Path = OUTPUTS) -> None:
    """Let outputs/latest point to `folder`, atomically; a text file where a disk has no symbolic links.

    Raises StorageError if it cannot.
    """
    latest, staged = outputs / LATEST, outputs / f".latest-{secrets.token_hex(4)}"
    # Both resolved: a relative link starts at the real folder, not at a link to it.
    target = os.path.relpath(folder.root.resolve(), outputs.resolve())
    try:
        staged.symlink_to(target)
    except OSError as error:
        if error.errno not in UNLINKABLE:
            raise _latest_error(latest, error) from error
        write_atomic(outputs / LATEST_TEXT, f"{target}\n")
        log.warning("%s has no symbolic links (%s): %s names the newest run", outputs, error.strerror, LATEST_TEXT)
        return
    try:
        os.replace(staged, latest)
        (outputs / LATEST_TEXT).unlink(missing_ok=True)
    except OSError as error:
        staged.unlink(missing_ok=True)
        raise _latest_error(latest, error) from error


def _latest_error(latest: Path, error: OSError) -> StorageError:
    text = f"cannot make {latest} a link to the run: {error.strerror}"
    return StorageError(f"{text}; does another file exist there?")


def latest_path(outputs: Path = OUTPUTS) -> Path:
    """outputs/latest, or the folder that is named in the text file beside it."""
    try:
        return outputs / (outputs / LATEST_TEXT).read_text(encoding="utf-8").strip()
    except OSError:
        return outputs / LATEST


def run_argument(folder: RunFolder, outputs: Path = OUTPUTS) -> str:
    """How a command names a run: latest, if outputs/latest points to its folder, or the folder."""
    return LATEST if latest_path(outputs).resolve() == folder.root.resolve() else display_path(folder.root)


def find_run(where: str, outputs: Path = OUTPUTS) -> RunFolder:
    """The run named by `where`: `latest` or a folder. Raises EnvironmentProblem if it is not a run."""
    root = latest_path(outputs) if where == LATEST else Path(where).expanduser()
    try:
        known = (root / "spec.yaml").is_file()
    except (OSError, ValueError) as error:  # an invalid file name, or a folder without permission
        raise EnvironmentProblem(f"{root}: cannot be read ({error})") from error
    if not known:
        is_export = (root.parent / "spec.yaml").is_file()
        whose = f"; it is an export of the run {root.parent}: use the run" if is_export else ""
        text = f"{root} is not a run: it has no spec.yaml"
        raise EnvironmentProblem(f"{text}; expected `latest` or the folder of a run{whose}")
    return RunFolder(root.resolve())


def find_trained_run(where: str, outputs: Path = OUTPUTS) -> tuple[RunFolder, RunFolder | None]:
    """The run named by `where`; for `latest`, the newest run with a checkpoint.

    Also returns the newest run if it was skipped because it has no checkpoint. Raises EnvironmentProblem if there is no
    run.
    """
    named = find_run(where, outputs)
    if where != "latest" or named.has_checkpoint:
        return named, None
    runs = (RunFolder(path.parent.resolve()) for path in sorted(outputs.glob("*/*/spec.yaml"), reverse=True))
    trained = next((run for run in runs if run.has_checkpoint), None)
    return (named, None) if trained is None else (trained, named)


def hold_lock(folder: RunFolder) -> FileLock:
    """Lock the run's folder for this process: for a `with` block, until its release or the process's end.

    Raises EnvironmentProblem if another process has the lock, StorageError.
    """
    with fsync_io.storage_errors(f"cannot write in {folder.root}"):
        lock = FileLock(folder.root / LOCK)
    try:
        lock.acquire().sign()
    except BlockingIOError:
        owner = lock.owner()
        lock.release()
        text = f"{folder.root}: process {owner} is running this job; wait for it, or stop it: kill {owner}"
        raise EnvironmentProblem(text) from None
    except OSError as error:
        lock.release()
        raise StorageError(f"cannot lock {folder.root}: {error.strerror}") from error
    return lock


def is_locked(folder: RunFolder) -> bool:
    """Whether a running process has locked the run's folder. Raises EnvironmentProblem if that is unknown."""
    try:
        return file_lock.is_locked(folder.root / LOCK)
    except OSError as error:
        raise EnvironmentProblem(f"{folder.root / LOCK} cannot be read: {error.strerror}") from error


def write_atomic(path: Path, text: str) -> None:
    """Replace a file by `text` atomically: readers, also after a crash, see the old or the new file.

    Raises StorageError if it cannot be written; the old file is then unchanged.
    """
    with fsync_io.storage_errors(f"cannot write {path}"):
        fsync_io.atomic_write(path, text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    """`write_atomic` of readable JSON; NaN or infinity is a ValueError."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False, default=str) + "\n"
    # A file name that is not UTF-8 has lone surrogates, which are valid JSON as \udcXX.
    write_atomic(path, text.encode("utf-8", "backslashreplace").decode("utf-8"))


def read_mapping(path: Path, *, must_exist: bool = False) -> dict[str, Any]:
    """The mapping in a JSON or YAML file; empty if the file does not exist, unless it must.

    Raises EnvironmentProblem if it cannot be read.
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
        raise EnvironmentProblem(f"{path} cannot be read: {getattr(error, 'problem', error)}") from error


def read_spec(folder: RunFolder) -> SavedSpec:
    """The run's spec in the options of this version. Raises EnvironmentProblem if it cannot be read."""
    return translate_spec(read_mapping(folder.spec, must_exist=True))


def display_path(path: Path) -> str:
    """The path for messages: relative if it is below the current folder."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
