"""The kinds of device of this package, and which cards this process may use, without torch.

Drivers hide mistakes in lists of visible devices (ASCEND_RT_VISIBLE_DEVICES, CUDA_VISIBLE_DEVICES), which are found
here.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from runner.core.device_kinds import KINDS, Kind
from runner.core.errors import EnvironmentProblem

CPU, CUDA, NPU = KINDS["cpu"], KINDS["cuda"], KINDS["npu"]
VARIABLES = {name: kind.visible for name, kind in KINDS.items() if kind.visible is not None}


@dataclass(frozen=True, slots=True)
class VisibleDevices:
    """The devices of a list, in its order (numbers, or names such as GPU-1a2b and MIG-…), and its faults."""

    ids: tuple[int | str, ...]
    faults: tuple[str, ...]

    def out_of_range(self, count: int) -> list[int]:
        """The numbers that `count` devices do not have."""
        return [number for number in self.ids if isinstance(number, int) and number >= count]


def parse_visible(text: str, names: Sequence[str] = ()) -> VisibleDevices:
    """Parse a comma-separated list; entries that begin with one of `names` are names, others numbers.

    An empty text asks for no device at all.
    """
    ids: list[int | str] = []
    faults = []
    for piece in [part.strip() for part in text.split(",")] if text.strip() else []:
        if piece.isdecimal():
            ids.append(int(piece))
        elif names and piece.startswith(tuple(names)):
            ids.append(piece)
        else:
            faults.append(f"'{piece}' is no device number" if piece else "an empty entry")
    repeated = sorted({str(number) for number in ids if ids.count(number) > 1})
    return VisibleDevices(tuple(ids), (*faults, *(f"{number} stands twice" for number in repeated)))


def unread_variable_problem(kind: Kind, environment: Mapping[str, str]) -> tuple[str, str] | None:
    """What is wrong, and what to type, where only a variable that no driver reads lists the cards."""
    if kind.unread is None or kind.unread not in environment or kind.visible in environment:
        return None
    said = environment[kind.unread]
    text = f"{kind.unread}={said} hides no card: the driver reads {kind.visible}, which is not set"
    return text, f"export {kind.visible}={said}; unset {kind.unread}"


def listed_cards(kind: Kind) -> tuple[str, ...] | None:
    """The cards that this process's environment lists; None where it has no list.

    Raises EnvironmentProblem for an invalid list, and for one in a variable that no driver reads.
    """
    said = os.environ.get(kind.visible) if kind.visible else None
    if said is None:
        if fault := unread_variable_problem(kind, os.environ):
            raise EnvironmentProblem("\n  ".join(fault))
        return None
    found = parse_visible(said, kind.names)
    if found.faults:
        advice = f"correct the list, or: unset {kind.visible}"
        raise EnvironmentProblem(f"{kind.visible}={said}: {'; '.join(found.faults)}\n  {advice}")
    return tuple(map(str, found.ids))


def present_cards(kind: Kind) -> tuple[str, ...]:
    """The cards that this process may use: those its environment lists, else all device files.

    Whether a driver stands behind them is known when torch has been imported. Raises EnvironmentProblem like `listed`.
    """
    if (own := listed_cards(kind)) is not None:
        return own
    assert kind.nodes is not None, f"{kind.name} has no cards"
    before = kind.nodes.partition("[")[0]
    numbers = (path.removeprefix(before) for path in glob.glob(kind.nodes))
    return tuple(sorted((number for number in numbers if number.isdecimal()), key=int))
