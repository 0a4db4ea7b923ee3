"""Whether a model that was spread still is the model it was: a handful of tokens, computed before and after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from runner.core.errors import SpecError
from runner.core.rank_info import tells_of_loss
from runner.interfaces import Peers


class Probed(Protocol):
    """What is needed of a model."""

    inner: Any

    # whether the hidden states of a handful of tokens still are these, as far as this rank can tell
    def computes(self, wanted: Tensor) -> bool: ...


def refuse_another(
    model: Probed, wanted: Tensor, everyone: Peers, refused: Callable[[str], SpecError], how: str
) -> None:
    """Raise what `refused` makes of the reason for a model that is another one now: on all ranks where it computes
    something else on one of them; where it cannot compute, on the ranks that cannot.

    wanted: what it once computed; how: what was done to it, in words. Collective over everyone. Memory that is
    exhausted and ranks that are lost are no fault of the model.
    """
    name = type(model.inner).__name__
    try:
        alike = model.computes(wanted)
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:  # of whatever kind it is
        if tells_of_loss(str(error)):
            raise
        said = (str(error).splitlines() or [""])[0]
        raise refused(f"{name} cannot compute {how} ({said})") from error
    if not all(everyone.gather(alike)):
        raise refused(f"{name} computes something else {how}")
