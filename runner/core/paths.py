"""Paths of the shipped conf/ and recipes/, in an installed package or a checkout, and of the cache."""

from __future__ import annotations

import os
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent


def conf_dir() -> Path:
    """The shipped config groups."""
    return _shipped_dir("conf")


def recipes_dir() -> Path:
    """The shipped recipes."""
    return _shipped_dir("recipes")


def cache_folder() -> Path:
    """Cache of tokens, reference log-probabilities and plug-ins: $RUNNER_CACHE, else the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get("RUNNER_CACHE") or Path(base) / "runner")


def _shipped_dir(name: str) -> Path:
    # The wheel's copy comes first: site-packages may hold somebody else's conf/ beside our package.
    installed = PACKAGE / f"_{name}"
    return installed if installed.is_dir() else PACKAGE.parent / name
