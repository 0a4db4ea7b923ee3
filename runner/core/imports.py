"""Large imports, out of the garbage collector's sight."""

from __future__ import annotations

import gc
import importlib
import sys
from types import ModuleType


def import_frozen(name: str) -> ModuleType:
    """Import a module with all that it imports while the collector rests, and exempt what exists then (`gc.freeze`).

    Modules live as long as the process. The collector would search their hundreds of thousands of objects again and
    again, and twice more at the end: a quarter of the processor time of a first step. A module that is there already
    is returned as it is.
    """
    if name in sys.modules:
        return sys.modules[name]
    enabled = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
