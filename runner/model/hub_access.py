"""Whether this machine can get a model's files, without torch: a folder, the hub's cache, the hub."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from runner.core.errors import EnvironmentProblem, Problem, SpecError

KNOCK_S = 3.0  # for the hub to accept a connection
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
PROXIES = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")  # what lies behind one is not seen from here


def check(path: str, key: str) -> None:
    """Raise EnvironmentProblem for a hub id that is not in the cache when the hub is off or unreachable."""
    if Path(path).expanduser().exists() or is_cached(path, os.environ):
        return
    if fault := hub_fault(os.environ):
        text = f"{key}={path} is no folder here and not in the cache of the hub, and {fault}"
        fetch = f"hf download {path} --local-dir {path.rpartition('/')[2]}"
        raise EnvironmentProblem(
            f"{text}\n  {fetch}  # where the hub can be reached; then copy the folder: {key}=FOLDER"
        )


def check_path(path: str) -> None:
    """Raise SpecError where model.path is meant as a folder but is no model; print when it is a hub id."""
    folder, known = Path(path).expanduser(), ("config.json", "adapter_config.json")
    if folder.exists():
        if folder.is_dir() and not any((folder / name).is_file() for name in known):
            raise SpecError([Problem("model.path", f"{path} holds no model: no config.json{_instead(folder)}")])
    elif is_hub_id(path):
        print(f"model.path: no folder {path} here, so taken as a hub id", file=sys.stderr)
    else:
        raise SpecError([Problem("model.path", f"{path}: no such folder; a model's folder or a hub id is expected")])


def is_hub_id(path: str) -> bool:
    """Whether a path that does not exist can be a hub id (owner/name).

    One that begins with an existing folder cannot.
    """
    if Path(path).expanduser().exists() or path.startswith(("/", ".", "~")) or path.count("/") > 1:
        return False
    return "/" not in path or not Path(path.split("/")[0]).is_dir()


def _instead(folder: Path) -> str:
    """The folder that was probably meant: a run's export, or one further in."""
    meant = next((at for at in (folder / "export", *sorted(folder.glob("*"))) if (at / "config.json").is_file()), None)
    return f"; did you mean {meant}?" if meant else ""


def is_cached(path: str, environment: Mapping[str, str]) -> bool:
    """Whether a version of this model is in the cache of the hub."""
    home = environment.get("HF_HOME", f"{environment.get('XDG_CACHE_HOME', '~/.cache')}/huggingface")
    cache = Path(environment.get("HF_HUB_CACHE", f"{home}/hub")).expanduser()
    return any((cache / f"models--{path.replace('/', '--')}").glob("snapshots/*/config.json"))


def hub_fault(environment: Mapping[str, str]) -> str | None:
    """Why nothing can be fetched from the hub; None = nothing is known against it."""
    for name in OFFLINE:
        if environment.get(name, "").upper() in ("1", "ON", "YES", "TRUE"):
            return f"{name}={environment[name]} forbids fetching it"
    if any(map(environment.get, PROXIES)):
        return None
    at = urlsplit(environment.get("HF_ENDPOINT", "https://huggingface.co"))
    try:
        socket.create_connection((at.hostname or "", at.port or (80 if at.scheme == "http" else 443)), KNOCK_S).close()
    except OSError as error:
        return f"{at.hostname} cannot be reached ({error.strerror or error})"
    return None
