"""What an Ascend chip's name says of its generation; npu-smi, torch_npu and wheels each spell names their own way."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

Generation = Literal["first", "A2", "A3", "310P", "310B", "950", "unknown"]


@dataclass(frozen=True, slots=True)
class Chip:
    """A generation's names, and what CANN's installers and the doctor say of it (see chips.yaml)."""

    pattern: str
    installer: str
    kernels: str
    remark: str | None = None


_TABLE = yaml.safe_load(Path(__file__).with_name("chips.yaml").read_text(encoding="utf-8"))
CHIPS: dict[Generation, Chip] = {name: Chip(**one) for name, one in _TABLE.items()}


def generation(name: str) -> Generation:
    """The generation that a chip's name belongs to: `910B3` → A2, `Ascend910_9392` → A3, `910B` → first."""
    bare = name.strip().lower().replace(" ", "").removeprefix("ascend")
    return next((found for found, chip in CHIPS.items() if re.fullmatch(chip.pattern, bare)), "unknown")


def soc_name(board: Mapping[str, str]) -> str | None:
    """The SoC's name of a record of `npu-smi info -t board`: type and chip name, or chip and NPU name.

    A2 and 310P print a chip type ("Ascend" + "910B4"), A3 and 950 an NPU name ("Ascend910" + "_" + "9392").
    None where the record has neither.
    """
    chip, kind, npu = (board.get(key, "") for key in ("chip name", "chip type", "npu name"))
    if chip and npu:
        return f"{chip}_{npu}"
    return f"{kind}{chip}" if chip and kind else None
