"""What an Ascend chip's name says of its generation; npu-smi, torch_npu and wheels each spell names their own way."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

Generation = Literal["first", "A2", "A3", "310P", "310B", "950", "unknown"]

# Checked in this order on the name in lower case without the prefix "ascend".
_RULES: tuple[tuple[re.Pattern[str], Generation], ...] = (
    (re.compile(r"950.*|a5"), "950"),
    (re.compile(r"310p.*"), "310P"),
    (re.compile(r"310b.*"), "310B"),
    (re.compile(r"910_?93\w*|910c|93\d\d|a3"), "A3"),
    (re.compile(r"910b[1-4](?:c|-1)?|a2"), "A2"),  # 910B3 is A2, whatever it is often taken for
    (re.compile(r"910(?:a|b|pro\w*|premium\w*)"), "first"),  # 910B without a digit is the first generation, not A2
    (re.compile(r"910"), "A3"),  # npu-smi info calls an A3 plainly Ascend910
)


def generation(name: str) -> Generation:
    """The generation that a chip's name belongs to: `910B3` → A2, `Ascend910_9392` → A3, `910B` → first."""
    bare = name.strip().lower().replace(" ", "").removeprefix("ascend")
    return next((found for pattern, found in _RULES if pattern.fullmatch(bare)), "unknown")


def soc_name(board: Mapping[str, str]) -> str | None:
    """The SoC's name of a record of `npu-smi info -t board`: type and chip name, or chip and NPU name.

    A2 and 310P print a chip type ("Ascend" + "910B4"), A3 and 950 an NPU name ("Ascend910" + "_" + "9392").
    None where the record has neither.
    """
    chip, kind, npu = (board.get(key, "") for key in ("chip name", "chip type", "npu name"))
    if chip and npu:
        return f"{chip}_{npu}"
    return f"{kind}{chip}" if chip and kind else None
