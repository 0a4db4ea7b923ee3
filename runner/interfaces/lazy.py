"""`torch`, imported when a function first uses it: what is registered can be listed and explained without it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
else:

    class _Lazy:
        """A module that is imported at its first attribute."""

        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, attribute: str) -> Any:
            return getattr(importlib.import_module(self._name), attribute)

    torch = _Lazy("torch")
