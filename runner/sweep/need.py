"""What a job occupies while it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Need:
    """Cores of this machine, GPUs or NPUs, and how many of them."""

    kind: Literal["core", "cuda", "npu"] = "core"
    count: int = 1
