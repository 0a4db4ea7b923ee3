"""What a job occupies of a machine while it runs, for those who hand out cores and cards: a sweep, Slurm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from runner.core.errors import Problem, SpecError
from runner.device.visible import VARIABLES

ORDER = ("npu", "cuda")  # which kind device=auto takes where there are several, like the device itself
WORDS = {"core": "core", "cuda": "GPU", "npu": "NPU"}


@dataclass(frozen=True, slots=True)
class Need:
    """Cores of a machine, GPUs or NPUs, and how many of them."""

    kind: Literal["core", "cuda", "npu"] = "core"
    count: int = 1

    def __str__(self) -> str:
        return f"{self.count} {WORDS[self.kind]}{'s' if self.count > 1 else ''}"

    @classmethod
    def of(cls, spec: Any, cards: Sequence[str] | None = None) -> Need:
        """What a job occupies on each of its machines, where these kinds of card are (None: that is not known).

        Raises SpecError for device=auto if none is known.
        """
        kind = spec.device.name
        if spec.device.is_auto:
            if cards is None:
                text = "auto is not known before a job runs there; name the device: cpu, cuda or npu"
                raise SpecError([Problem("device", text)])
            kind = next((k for k in ORDER if k in cards), "cpu")
        processes = spec.launch.devices + spec.launch.samplers
        if kind in VARIABLES:
            return cls(kind, processes)
        return cls("core", spec.device.host_threads * processes)
