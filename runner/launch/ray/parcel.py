"""What goes with a job that is handed over to a cluster: its spec, and what the spec names in this folder.

A relative path is of this folder, and goes along; an absolute one is of the cluster, and is looked at there.
"""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from runner.errors import EnvironmentProblem, Problem, SpecError
from runner.launch.preflight import check_model
from runner.launch.ray import arrival
from runner.launch.stage import RECIPE
from runner.paths import recipes_dir
from runner.spec.job import JobSpec
from runner.spec.origin import leaves

WITH_PATHS = ("data", "model", "algorithm", "reward")  # the groups whose options name files and folders
LIMIT_BYTES = 100 << 20  # Ray keeps what goes along in its head's memory; it ends at 512 MiB itself
BIGGEST = 3  # that an error names


@dataclass(frozen=True, slots=True)
class Parcel:
    """A job as it travels. `files`: name in the parcel → the file here; `key`: of their content."""

    spec: dict[str, Any]
    files: dict[str, Path]
    key: str

    @property
    def size(self) -> int:
        """Bytes of the files, before they are compressed."""
        return sum(path.stat().st_size for path in self.files.values())

    def write(self, target: Path) -> None:
        """Pack it as Ray unpacks it: a zip of spec.yaml, arrival.py and the files."""
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.write(arrival.__file__, "arrival.py")
            archive.writestr(arrival.SPEC, yaml.safe_dump(self.spec, sort_keys=False, allow_unicode=True))
            for name, path in self.files.items():
                archive.write(path, f"{arrival.FILES}/{name}")


def packed(spec: JobSpec) -> Parcel:
    """The job as it is to be typed on the cluster, and what goes with it.

    Raises SpecError, DataError for what is wrong with what is here; EnvironmentProblem where it is too much.
    """
    _check(spec)
    found: dict[str, Path] = {}

    def noted(path: str, name: str) -> str:
        found[name] = Path(path)
        return path

    _renamed(spec, noted)
    files = {name: path for top, place in sorted(found.items()) for name, path in _all_of(top, place)}
    _refuse_too_much(files)
    key = _key_of(files)
    data = _renamed(spec, lambda path, name: f"{arrival.KEPT}/{key}/{name}")
    data["launch"] |= {"address": "auto", "folder": None}
    return Parcel(data, files, key)


def _check(spec: JobSpec) -> None:
    """Whatever can be said here: of what goes along, and not of what the cluster has."""
    if not _is_elsewhere(spec.model):
        check_model(spec)
    if not _is_elsewhere(spec.data):
        spec.data.preflight(spec.algorithm.items)
    if dict(leaves(spec.reward.model_dump(mode="json"))).get("path") and not _is_elsewhere(spec.reward):
        spec.reward.preflight()
    first = {"init_from": spec.init_from, **{f"algorithm.{k}": v for k, v in spec.algorithm.first_models().items()}}
    for option, name in first.items():
        own = (name or "").removeprefix(RECIPE)
        if name is not None and name != own and not (recipes_dir() / f"{own}.yaml").is_file():
            text = f"{name} is a recipe of yours, and not on the cluster; run it on its own, then name its folder"
            raise SpecError([Problem(option, text)])


def _is_elsewhere(config: Any) -> bool:
    """Whether an option of a group names an absolute path, which is the cluster's."""
    return any(_is_theirs(text) for text in _texts(config.model_dump(mode="json")))


def _is_theirs(path: str) -> bool:
    """Whether a path is one of the cluster."""
    return os.path.isabs(os.path.expanduser(path))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)


def _renamed(spec: JobSpec, named: Callable[[str, str], str]) -> dict[str, Any]:
    """The spec as plain data, each relative path that leads to something here replaced: `named(path, name to be)`."""
    data = spec.model_dump(mode="json")
    for group in WITH_PATHS:
        data[group] = _swapped(data[group], getattr(spec, group).absolute().model_dump(mode="json"), named)
    first = spec.init_from
    if first is not None and not first.startswith(RECIPE) and not _is_theirs(first):
        weights = next((place for place in (Path(first, "export"), Path(first)) if place.is_dir()), None)
        if weights is None:
            raise SpecError([Problem("init_from", f"{first}: no such folder here; an absolute path is the cluster's")])
        data["init_from"] = named(str(weights.resolve()), _name_of(weights.resolve()))
    return data


def _swapped(before: Any, after: Any, named: Callable[[str, str], str]) -> Any:
    """`before` with what has become absolute in `after` replaced; a function stays behind its file's colon."""
    if isinstance(before, dict):
        return {name: _swapped(value, after[name], named) for name, value in before.items()}
    if isinstance(before, list):
        return [_swapped(*both, named) for both in zip(before, after, strict=True)]
    if not isinstance(before, str) or before == after or _is_theirs(before):
        return before
    path, colon, function = (after, "", "") if os.path.exists(after) else after.rpartition(":")
    return named(path, _name_of(Path(path))) + colon + function


def _name_of(path: Path) -> str:
    """What a file or folder is called in the parcel: as below this folder, or by a folder of its own."""
    here = Path.cwd().resolve()
    if path.is_relative_to(here) and path != here:
        return str(path.relative_to(here))
    return f"beside/{hashlib.sha256(str(path.parent).encode()).hexdigest()[:8]}/{path.name}"


def _all_of(name: str, place: Path) -> Iterator[tuple[str, Path]]:
    """A file, or all files below a folder, links followed, by their names in the parcel."""
    if not place.is_dir():
        yield name, place
        return
    for folder, _, files in sorted(os.walk(place, followlinks=True)):
        for file in sorted(files):
            path = Path(folder, file)
            yield f"{name}/{path.relative_to(place)}", path


def _refuse_too_much(files: dict[str, Path]) -> None:
    sizes = sorted(((path.stat().st_size, name) for name, path in files.items()), reverse=True)
    total = sum(size for size, _ in sizes)
    if total > LIMIT_BYTES:
        named = ", ".join(f"{name} ({in_words(size)})" for size, name in sizes[:BIGGEST])
        text = f"the job names {in_words(total)} of this folder, and {in_words(LIMIT_BYTES)} can go with it: {named}"
        raise EnvironmentProblem(f"{text}\n  lay it on the cluster's disk, and type its absolute path there")


def _key_of(files: dict[str, Path]) -> str:
    digest = hashlib.sha256()
    for name, path in files.items():
        with path.open("rb") as file:
            digest.update(f"{name}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()[:16]


def in_words(size: int) -> str:
    """A number of bytes, for people."""
    for unit, step in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= step:
            return f"{size / step:.1f} {unit}"
    return f"{size} bytes"
