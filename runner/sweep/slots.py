"""Which job gets which cores, GPUs or NPUs of this machine, and how many jobs fit at once.

CUDA_VISIBLE_DEVICES and ASCEND_RT_VISIBLE_DEVICES hand out cards (and bound what is handed out, where the user has set
them); cores are handed out by affinity, so that jobs do not fight over them.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable
from typing import Any

from runner.device.visible import VARIABLES, parse
from runner.errors import EnvironmentProblem, Problem, SpecError
from runner.sweep.need import Need

NAMES = ("GPU-", "MIG-")  # what a card may be called instead of its number
PLACES = {"cuda": "/dev/nvidia[0-9]*", "npu": "/dev/davinci[0-9]*"}
WORDS = {"core": "core", "cuda": "GPU", "npu": "NPU"}


def need_of(spec: Any) -> Need:
    """What a job occupies; `auto` takes an NPU where there is one, then a GPU, then cores, like the device itself."""
    kind = spec.device.name
    if kind == "auto":
        kind = next((k for k in ("npu", "cuda") if present(k)), "cpu")
    if kind in VARIABLES:
        return Need(kind, spec.launch.devices)
    return Need("core", getattr(spec.device, "threads", 1) * spec.launch.devices)


def present(kind: str) -> tuple[str, ...]:
    """The cores or cards that this process may use, as its environment names them."""
    if kind == "core":
        return tuple(map(str, sorted(os.sched_getaffinity(0))))
    if (said := os.environ.get(VARIABLES[kind])) is not None:
        visible = parse(said, NAMES if kind == "cuda" else ())
        if visible.faults:
            raise EnvironmentProblem(f"{VARIABLES[kind]}={said}: {'; '.join(visible.faults)}")
        return tuple(map(str, visible.ids))
    numbers = (path.removeprefix(PLACES[kind].partition("[")[0]) for path in glob.glob(PLACES[kind]))
    return tuple(sorted((n for n in numbers if n.isdecimal()), key=int))


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
        if parallel is not None and self.shared and kinds.keys() != {"core"}:
            said = ", ".join(f"{len(ids)} {WORDS[kind]}(s)" for kind, ids in self._all.items())
            raise SpecError([Problem("sweep.parallel", f"{parallel} jobs do not fit at once: there are {said}")])
        self.parallel = min(parallel or fit, len(needs))
        self._least = {kind: min(n.count for n in needs if n.kind == kind) for kind in kinds}
        self._free = {kind: list(ids) for kind, ids in self._all.items()}
        self._held = 0

    def is_free(self) -> bool:
        """Whether one more job may run; all jobs of a search need the same."""
        enough = any(len(free) >= self._least[kind] for kind, free in self._free.items())
        return self._held < self.parallel and (self.shared or enough)

    def acquire(self, need: Need) -> tuple[str, ...] | None:
        """Devices for a job, or None while there are none."""
        if self._held >= self.parallel:
            return None
        if self.shared:
            self._held += 1
            return self._all["core"]
        free = self._free[need.kind]
        if len(free) < need.count:
            return None
        self._held += 1
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
    word = WORDS[need.kind] + ("s" if need.count > 1 else "")
    if need.kind == "core":
        text = f"a job wants {need.count} {word}, and this machine has {len(there)}"
        raise SpecError([Problem("device.threads", text)])
    said = os.environ.get(VARIABLES[need.kind])
    why = f"those of {PLACES[need.kind]}" if said is None else f"{VARIABLES[need.kind]}={said}"
    raise EnvironmentProblem(f"a job wants {need.count} {word}, and {len(there)} can be used here ({why})")
