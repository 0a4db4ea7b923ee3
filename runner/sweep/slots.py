"""Which job gets which cores, GPUs or NPUs of this machine, and how many jobs fit at once.

CUDA_VISIBLE_DEVICES and ASCEND_RT_VISIBLE_DEVICES hand out cards (and bound what is handed out, where the user has set
them); cores are handed out by affinity, so that jobs do not fight over them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from runner.device import visible
from runner.device.kinds import KINDS
from runner.device.visible import VARIABLES
from runner.errors import EnvironmentProblem, Problem, SpecError
from runner.sweep.need import LOWER_CARDS, LOWER_CORES, WORDS, Need, counted


def present(kind: str) -> tuple[str, ...]:
    """The cores or cards that this process may use, as its environment names them."""
    if kind == "core":
        return tuple(map(str, sorted(os.sched_getaffinity(0))))
    return visible.present(KINDS[kind])


def cards_here() -> tuple[str, ...]:
    """The kinds of card that this machine has."""
    return tuple(kind for kind in VARIABLES if present(kind))


class Slots:
    """Hands out devices. With more jobs at once than cores, the jobs share the cores."""

    def __init__(self, needs: Iterable[Need], parallel: int | None) -> None:
        """Raises SpecError or EnvironmentProblem where a job can never start, or `parallel` jobs never at once."""
        needs = list(needs)
        kinds = dict.fromkeys(need.kind for need in needs)
        self._all = {kind: present(kind) for kind in kinds}
        for need in needs:
            _refuse(need, self._all[need.kind])
        fit = sum(len(self._all[k]) // max(min(n.count for n in needs if n.kind == k), 1) for k in kinds)
        self.shared = parallel is not None and parallel > fit
        if parallel is not None and self.shared and kinds.keys() - {"core"}:
            said = ", ".join(f"{len(ids)} {WORDS[kind]}(s)" for kind, ids in self._all.items())
            raise SpecError([Problem("sweep.parallel", f"{parallel} jobs do not fit at once: there are {said}")])
        self.parallel = min(parallel or fit, len(needs))
        self._free = {kind: list(ids) for kind, ids in self._all.items()}
        self._held = 0

    def has_room(self, need: Need) -> bool:
        """Whether one more job may run."""
        return self._held < self.parallel and (self.shared or len(self._free[need.kind]) >= need.count)

    def acquire(self, need: Need) -> tuple[str, ...] | None:
        """Devices for a job, or None while there are none."""
        if not self.has_room(need):
            return None
        self._held += 1
        if self.shared:
            return self._all["core"]
        free = self._free[need.kind]
        taken, self._free[need.kind] = free[: need.count], free[need.count :]
        return tuple(taken)

    def release(self, need: Need, devices: tuple[str, ...]) -> None:
        """Take a job's devices back."""
        self._held -= 1
        if not self.shared:
            order = self._all[need.kind].index
            self._free[need.kind] = sorted([*self._free[need.kind], *devices], key=order)

    def describe(self, needs: Iterable[Need]) -> str:
        """`1 core each of 2; 2 jobs at once`."""
        parts = []
        for kind, ids in self._all.items():
            counts = sorted({need.count for need in needs if need.kind == kind})
            each = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
            parts.append(f"{each} {WORDS[kind]}{'s' if counts[-1] > 1 else ''} each, of {len(ids)}")
        at_once = f"{self.parallel} job{'s' if self.parallel > 1 else ''} at once"
        return ", ".join(parts) + f"; {at_once}" + (", which share the cores" if self.shared else "")


def environment(need: Need, devices: tuple[str, ...]) -> dict[str, str]:
    """The variable that shows a job its cards and no others."""
    return {VARIABLES[need.kind]: ",".join(devices)} if need.kind in VARIABLES else {}


def _refuse(need: Need, there: tuple[str, ...]) -> None:
    if need.count <= len(there):
        return
    wants = f"a job wants {counted(need.count, need.kind)}"
    if need.kind == "core":
        raise EnvironmentProblem(f"{wants}, and this machine has {len(there)}; {LOWER_CORES}")
    kind = KINDS[need.kind]
    said = os.environ.get(VARIABLES[need.kind])
    why = f"those of {kind.nodes}" if said is None else f"{kind.visible}={said}"
    raise EnvironmentProblem(f"{wants}, and {len(there)} can be used here ({why}); {LOWER_CARDS}")
