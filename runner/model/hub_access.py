"""Whether this machine can get a model's files, without torch: a folder, the hub's cache, the hub."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from runner.core.errors import EnvironmentProblem

ANSWER_S = 5.0  # for the hub to answer
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
PROXIES = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")  # what lies behind one is not seen from here


def check(path: str, key: str = "") -> None:
    """Raise EnvironmentProblem for a hub id whose files are neither cached nor available.

    The hub is switched off, or does not answer. `key` is the option that says the path, if one does.
    """
    if Path(path).expanduser().exists() or is_cached(path, os.environ):
        return
    if fault := hub_fault(os.environ):
        named, then = (f"{key}={path}", f"{key}=FOLDER") if key else (path, "that folder")
        text = f"{named} is no folder here and not in the cache of the hub, and {fault}"
        fetch = f"hf download {path} --local-dir {path.rpartition('/')[2]}"
        raise EnvironmentProblem(
            f"{text}\n  {fetch}  # where the hub can be reached; then copy the folder, and give {then}"
        )


def is_hub_id(path: str) -> bool:
    """Whether a path that does not exist can be a hub id (owner/name).

    One that begins with an existing folder cannot.
    """
    if Path(path).expanduser().exists() or path.startswith(("/", ".", "~")) or path.count("/") > 1:
        return False
    return "/" not in path or not Path(path.split("/")[0]).is_dir()


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
    endpoint = environment.get("HF_ENDPOINT", "https://huggingface.co")
    from runner.core.http_client import ClientError, failure_reason, request, run_coroutine

    try:
        run_coroutine(request("HEAD", endpoint, timeout_s=ANSWER_S, largest_bytes=1 << 20))
    except TimeoutError:
        return f"{endpoint} does not answer within {ANSWER_S:g} s"
    except (OSError, ClientError, ValueError) as error:
        return f"{endpoint} cannot be reached ({failure_reason(error)})"
    return None
