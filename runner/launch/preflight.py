"""What can be said of a job's paths before its run folder is made and torch is imported."""

from __future__ import annotations

import sys
from pathlib import Path

from runner.errors import Problem, SpecError
from runner.spec.job import JobSpec


def check_model(spec: JobSpec) -> None:
    """Raise SpecError where model.path is meant as a folder and is no model's; say where it is taken as a hub id."""
    path = getattr(spec.model, "path", None)
    if path is None:
        return
    folder = Path(path).expanduser()
    if folder.exists():
        if folder.is_dir() and not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
            raise SpecError([Problem("model.path", f"{path} holds no model: no config.json{_instead(folder)}")])
    elif _is_place(path):
        raise SpecError([Problem("model.path", f"{path}: no such folder; a model's folder or a hub id is expected")])
    else:
        print(f"model.path: no folder {path} here, so taken as a hub id", file=sys.stderr)


def is_hub_id(path: str) -> bool:
    """Whether a path that leads nowhere here can be the hub's."""
    return not Path(path).expanduser().exists() and not _is_place(path)


def _is_place(path: str) -> bool:
    """Whether a path that leads nowhere can be no hub id (owner/name), or begins with a folder that is here."""
    return (
        path.startswith(("/", ".", "~")) or path.count("/") > 1 or ("/" in path and Path(path.split("/")[0]).is_dir())
    )


def _instead(folder: Path) -> str:
    """The folder that was probably meant: a run's export, or one further in."""
    meant = next((place for place in (folder / "export", *sorted(folder.glob("*"))) if _is_model(place)), None)
    return f"; did you mean {meant}?" if meant else ""


def _is_model(place: Path) -> bool:
    return (place / "config.json").is_file()
