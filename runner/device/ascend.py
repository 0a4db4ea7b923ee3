"""Ascend NPUs without torch: the folder of CANN, their toolkit, and the generation of a chip's name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from runner.core.package import read_table

HOME_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")  # set by CANN's set_env.sh
# Below the default folders of its installers (as root, as a user, by conda).
LAYOUTS = ("cann", "ascend-toolkit/latest", "cann-*", "ascend-toolkit/[0-9]*")


def install_folders(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The usual folders: root's, the user's, the conda environment's."""
    roots = ("/usr/local", environment.get("HOME"), environment.get("CONDA_PREFIX"))
    return tuple(f"{root.rstrip('/')}/Ascend" for root in roots if root)


def toolkit_folders(environment: Mapping[str, str], root: Path = Path("/")) -> Iterator[str]:
    """Folders of installed toolkits: those that the environment names, then the usual ones, newest first."""
    named = [environment.get(name, "").rstrip("/") for name in HOME_VARIABLES]
    for home in [*filter(None, named), *_default_folders(environment, root)]:
        if (root / home.lstrip("/")).is_dir():
            yield home


def _default_folders(environment: Mapping[str, str], root: Path) -> Iterator[str]:
    for parent in install_folders(environment):
        folder = root / parent.lstrip("/")
        for layout in LAYOUTS:
            for found in sorted(folder.glob(layout), key=_numbers, reverse=True):
                yield f"{parent}/{found.relative_to(folder)}"


def _numbers(path: Path) -> list[int]:
    """The numbers in a folder's name, so that cann-9.10 comes after cann-9.9."""
    return [int(number) for number in re.findall(r"\d+", path.name)]


def set_env_script(home: str, root: Path = Path("/")) -> str:
    """The set_env.sh of a toolkit: in its folder or, in the older layout, beside it."""
    places = [f"{place}/set_env.sh" for place in (home, home.rpartition("/")[0])]
    return next((place for place in places if (root / place.lstrip("/")).exists()), places[0])


Generation = Literal["first", "A2", "A3", "310P", "310B", "950", "unknown"]


@dataclass(frozen=True, slots=True)
class Chip:
    """A generation of chips: names, and texts of CANN's installers and the doctor (see chips.yaml)."""

    pattern: str
    installer: str
    kernels: str
    remark: str | None = None


_TABLE = read_table(__file__, "chips.yaml")
CHIPS: dict[Generation, Chip] = {name: Chip(**one) for name, one in _TABLE.items()}


def generation(name: str) -> Generation:
    """The generation that a chip's name belongs to: `910B3` → A2, `Ascend910_9392` → A3, `910B` → first."""
    bare = name.strip().lower().replace(" ", "").removeprefix("ascend")
    return next((found for found, chip in CHIPS.items() if re.fullmatch(chip.pattern, bare)), "unknown")


def soc_name(board: Mapping[str, str]) -> str | None:
    """The SoC's name of a record of `npu-smi info -t board`: type and chip name, or chip and NPU name.

    A2 and 310P print a chip type ("Ascend" + "910B4"), A3 and 950 an NPU name ("Ascend910" + "_" + "9392").
    None if the record has neither.
    """
    chip, kind, npu = (board.get(key, "") for key in ("chip name", "chip type", "npu name"))
    if chip and npu:
        return f"{chip}_{npu}"
    return f"{kind}{chip}" if chip and kind else None
