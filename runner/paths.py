"""Where the shipped conf/ and recipes/ are: inside an installed package, or beside it in a checkout."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def conf_dir() -> Path:
    """The shipped config groups."""
    return _shipped("conf")


def recipes_dir() -> Path:
    """The shipped recipes."""
    return _shipped("recipes")


def _shipped(name: str) -> Path:
    # The wheel's copy comes first: site-packages may hold somebody else's conf/ beside our package.
    installed = PACKAGE / f"_{name}"
    return installed if installed.is_dir() else PACKAGE.parent / name
