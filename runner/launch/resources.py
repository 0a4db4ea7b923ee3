"""Resources of one machine that a job uses, for sweeps and Slurm, which assign cores and cards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from runner.core.device_kinds import Kind, card_kinds, find_kind
from runner.core.errors import Problem, SpecError
from runner.device.device_kinds import CPU

CORE = "core"


def kind_of(name: str) -> Kind:
    """The kind of device that is meant by a need's `kind`."""
    return CPU if name == CORE else find_kind(name)


@dataclass(frozen=True, slots=True)
class ResourceRequest:
    """Cores of a machine, or cards of a kind by its name, and how many of them."""

    kind: str = CORE
    count: int = 1

    def __str__(self) -> str:
        return f"{self.count} {kind_of(self.kind).word}{'s' if self.count > 1 else ''}"

    @classmethod
    def of_spec(cls, spec: Any, cards: Sequence[str] | None = None) -> ResourceRequest:
        """What a job uses on each of its machines, which have these kinds of card (None: unknown).

        Raises SpecError for device=auto if none is known.
        """
        kind = spec.device.occupies
        if spec.device.is_auto:
            if cards is None:
                text = "auto is not known before a job runs there; name the device: cpu, cuda or npu"
                raise SpecError([Problem("device", text)])
            kind = next((kind for name, kind in card_kinds().items() if name in cards), CPU)
        processes = spec.launch.devices + spec.launch.samplers
        return cls(CORE, spec.device.host_threads * processes) if kind is CPU else cls(kind.name, processes)
