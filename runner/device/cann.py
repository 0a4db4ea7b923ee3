"""Where CANN, the toolkit of NPUs, lies: what a job asks before it starts, and the doctor. Nothing of it is loaded."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

HOME_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")  # which its set_env.sh sets
# Below the folder that its installers, run as root, as a user, or by conda, choose unless they are told another.
LAYOUTS = ("cann", "ascend-toolkit/latest", "cann-*", "ascend-toolkit/[0-9]*")


def parents(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The usual folders: root's, the user's, the conda environment's."""
    roots = ("/usr/local", environment.get("HOME"), environment.get("CONDA_PREFIX"))
    return tuple(f"{root.rstrip('/')}/Ascend" for root in roots if root)


def homes(environment: Mapping[str, str], root: Path = Path("/")) -> Iterator[str]:
    """The folders of toolkits that are there: those that the environment names, then the usual ones, newest first."""
    named = [environment.get(name, "").rstrip("/") for name in HOME_VARIABLES]
    for home in [*filter(None, named), *_usual(environment, root)]:
        if (root / home.lstrip("/")).is_dir():
            yield home


def _usual(environment: Mapping[str, str], root: Path) -> Iterator[str]:
    for parent in parents(environment):
        folder = root / parent.lstrip("/")
        for layout in LAYOUTS:
            for found in sorted(folder.glob(layout), key=_numbers, reverse=True):
                yield f"{parent}/{found.relative_to(folder)}"


def _numbers(path: Path) -> list[int]:
    """The numbers in a folder's name, so that cann-9.10 comes after cann-9.9."""
    return [int(number) for number in re.findall(r"\d+", path.name)]


def script(home: str, root: Path = Path("/")) -> str:
    """The set_env.sh that loads this toolkit's environment: in its folder or, in the older layout, beside it."""
    places = [f"{place}/set_env.sh" for place in (home, home.rpartition("/")[0])]
    return next((place for place in places if (root / place.lstrip("/")).exists()), places[0])
