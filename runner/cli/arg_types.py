"""Types of the options with dashes: text to value, or argparse.ArgumentTypeError."""

from __future__ import annotations

import argparse
from pathlib import Path


def parse_path(text: str) -> Path:
    """A path; one that begins with ~ is of the home folder, also where no shell has seen it."""
    return Path(text).expanduser()


def parse_python(text: str) -> Path:
    """The Python of an environment: its path, or the environment's folder."""
    path = parse_path(text)
    path = path / "bin" / "python" if path.is_dir() else path
    if path.is_file():
        return path.absolute()  # and not resolved: the link is what says which environment it is
    raise argparse.ArgumentTypeError(f"expected a Python or an environment's folder, e.g. .venv-old, got '{text}'")


def parse_numbers(text: str) -> tuple[float, ...]:
    """Numbers, separated by commas."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected numbers such as 1,0.5, got '{text}'") from error


def parse_job_numbers(text: str) -> tuple[int, ...]:
    """Numbers of jobs, separated by commas."""
    if all(part.isdecimal() for part in text.split(",")):
        return tuple(dict.fromkeys(int(part) for part in text.split(",")))
    raise argparse.ArgumentTypeError(f"expected numbers of jobs such as 3,7, got '{text}'")


def parse_count(text: str) -> int:
    """A number from 1."""
    if text.isdecimal() and int(text):
        return int(text)
    raise argparse.ArgumentTypeError(f"expected a number from 1, got '{text}'")


def parse_share(text: str) -> float:
    """0.5% or 0.005."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if 0 <= share < 1:
        return share
    raise argparse.ArgumentTypeError(f"expected a fraction such as 0.5% or 0.005, got '{text}'")


def parse_checkpoint(text: str) -> int | str:
    """A step, `best` or `last`."""
    if text in ("best", "last") or text.isdecimal():
        return int(text) if text.isdecimal() else text
    raise argparse.ArgumentTypeError(f"expected a step, best or last, got '{text}'")
