"""Copies of the user's files in the run folder: a run reads what it began with until its end.

    my_reward.py ─────────copy_user_files──▶ user_files/home/me/my_reward.py ──with_copied_files──▶ each process
    helper.py, imported by it ─────────────▶ user_files/home/me/helper.py

spec.yaml keeps the paths that the user gave. Copied are reward functions and environments with the modules beside them
that they import by a statement, and chat templates. Data and models are compared by their digests instead
(`run_identity`).
"""

from __future__ import annotations

import ast
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from runner.core import fsync_io
from runner.run_dir.folder import RunFolder
from runner.spec.job import JobSpec


def copy_user_files(spec: JobSpec, folder: RunFolder) -> None:
    """Copy the files that a checked spec names. Raises StorageError."""

    def copy(file: Path) -> Path:
        with fsync_io.storage_errors(f"cannot copy {file} to {folder.user_files}"):
            for one in (file, *imported_files(file)):
                target = _copy_of(folder, one)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(one, target)
        return file

    _with_files(spec, copy)


def with_copied_files(spec: JobSpec, folder: RunFolder) -> JobSpec:
    """The spec with the copies in place of the user's files, where there are copies."""

    def copy_path(file: Path) -> Path:
        return copy if (copy := _copy_of(folder, file)).is_file() else file

    return _with_files(spec, copy_path) if folder.user_files.is_dir() else spec


def original_path(file: Path) -> Path:
    """The path of the user's file that a copy was made of; any other path as it is."""
    for parent in file.parents:
        if parent.name == RunFolder.user_files.name and (parent.parent / RunFolder.spec.name).is_file():
            return Path("/", file.relative_to(parent))
    return file


def imported_files(file: Path) -> list[Path]:
    """The Python files beside `file` that it imports, whole packages, and those that they import."""
    found: dict[Path, None] = {}
    unread = [file]
    while unread:
        for one in _imports(unread.pop(), file.parent):
            if one != file and one not in found:
                found[one] = None
                unread.append(one)
    return list(found)


def _imports(file: Path, beside: Path) -> Iterator[Path]:
    """The modules in the folder `beside` that a file imports by a statement."""
    if file.suffix != ".py":
        return
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # said where it is imported
        return
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [node.module]
        for name in {one.partition(".")[0] for one in names}:
            module, package = beside / f"{name}.py", beside / name
            if package.is_dir():
                yield from sorted(package.rglob("*.py"))
            elif module.is_file():
                yield module


def _copy_of(folder: RunFolder, file: Path) -> Path:
    return folder.user_files / file.absolute().relative_to("/")


def _with_files(spec: JobSpec, change: Callable[[Path], Path]) -> JobSpec:
    """The spec with each file of the user's changed."""
    names = ("chat", "reward", "environment", "evaluation")
    return spec.model_copy(update={name: getattr(spec, name).with_user_files(change) for name in names})
