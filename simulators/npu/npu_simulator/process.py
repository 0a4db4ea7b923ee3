"""Makes this process one with simulated NPUs: before torch is imported, torch_npu is put where Python finds it.

enter(): CANN's stub is loaded ─▶ the wheel is on sys.path ─▶ import torch ─▶ import torch_npu ─▶ install()
"""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from npu_simulator.prepare import Parts
from npu_simulator.stub import HOME, SONAMES
from runner.core.device_kinds import VARIABLES, parse_visible
from runner.core.errors import EnvironmentProblem

OPERATORS = "libopapi.so"
CANN_VERSION = "8.5.0"  # what the stub says it is


@dataclass(frozen=True, slots=True)
class Pretence:
    """What the process is to see."""

    cards: int
    memory_bytes: int  # of each card
    soc: str


_entered: list[tuple[Parts, Pretence]] = []  # at most one: a process cannot change its NPUs


def entered() -> Parts | None:
    """The parts that this process runs on; None before `enter`."""
    return _entered[0][0] if _entered else None


def enter(parts: Parts, pretence: Pretence) -> None:
    """Load the stub and let Python find torch_npu; a second time it only has to be the same.

    Raises EnvironmentProblem if the process has torch already, or the real CANN, or has pretended otherwise before.
    """
    if _entered:
        if _entered[0] != (parts, pretence):
            raise EnvironmentProblem(f"device=npu_sim: this process pretends {_entered[0][1]} already, not {pretence}")
        return
    if "torch" in sys.modules:  # what it found then, its gradient engine keeps: a card would come too late
        raise EnvironmentProblem("device=npu_sim: torch is imported already; start a process of its own")
    _need_no_cann()
    libraries = [ctypes.CDLL(str(parts.built / f"{name}.so"), mode=ctypes.RTLD_GLOBAL) for name in SONAMES]
    _pretend(libraries[0], pretence)
    os.environ.update(ASCEND_HOME_PATH=str(parts.built / HOME), ASCEND_OPP_PATH=str(parts.built / HOME / "opp"))
    sys.modules.pop("torch_npu", None)  # None where it was hidden
    sys.path.insert(0, str(parts.wheel))
    _entered.append((parts, pretence))


def _pretend(library: ctypes.CDLL, pretence: Pretence) -> None:
    words = (pretence.soc.encode(), CANN_VERSION.encode())
    if library.npu_sim_pretend(_visible(pretence.cards), ctypes.c_size_t(pretence.memory_bytes), *words):
        raise EnvironmentProblem(f"device=npu_sim: cannot pretend {pretence}")


def _visible(cards: int) -> int:
    """How many of the cards the process may see: like the driver, leave out numbers that there are not."""
    text = os.environ.get(VARIABLES["npu"])
    return cards if text is None else len({n for n in parse_visible(text).ids if isinstance(n, int) and n < cards})


def _need_no_cann() -> None:
    """The real operators of CANN would be found beside the simulated runtime, and end the process."""
    folders = [Path(folder) for folder in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if folder]
    if found := next((folder for folder in folders if (folder / OPERATORS).exists()), None):
        raise EnvironmentProblem(
            f"device=npu_sim: CANN is loaded in this shell ({found / OPERATORS}); start from one without its set_env.sh"
        )
