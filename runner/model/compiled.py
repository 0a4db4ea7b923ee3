"""Decoder layers through torch.compile: for the passes of training and scoring, not where text is written.

    layer ──▶ its parts (norms, attention, feed-forward), each compiled once for all layers and for any number of tokens
                             └── attention over rows end to end stays as it is, between two compiled pieces

Parts and not the layer: what is recomputed (runner.model.recompute) and what is gathered (FSDP2) happens around them.
Attention over rows is cut where rows end, which is another cut in every batch, and would be compiled for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from runner.core.errors import EnvironmentProblem
from runner.model.attention import NAME, ragged_attention

OPTIONS: dict[str, Any] = {
    "dynamic": True,
    "options": {"fallback_random": True},  # dropout draws what it draws without
}


class Compiled:
    """Some layers, whose parts compute by what torch has compiled from now on."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        """Nothing is compiled before it runs. Parts have all that is put into them by now: adapters, a device's own
        operators."""
        ALL_ATTENTION_FUNCTIONS.register(NAME, torch.compiler.disable(ragged_attention))
        self._parts: list[tuple[Any, Callable[..., Any]]] = []
        for part in (part for layer in layers for part in layer.children()):
            self._parts.append((part, part.forward))
            part.forward = torch.compile(part.forward, **OPTIONS)

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Let the parts compute as they did, for as long as the block lasts."""
        compiled = [part.forward for part, _ in self._parts]
        for part, forward in self._parts:
            part.forward = forward
        try:
            yield
        finally:
            for (part, _), forward in zip(self._parts, compiled, strict=True):
                part.forward = forward


@cache
def refuse_without_compiler(device: torch.device) -> None:
    """Raise EnvironmentProblem where torch cannot compile for `device`: it is tried with a sum."""

    def doubled(numbers: Tensor) -> Tensor:
        return numbers + numbers

    try:
        torch.compile(doubled, **OPTIONS)(torch.ones(4, device=device))
    except RuntimeError as error:  # of whatever kind a compiler fails with
        said = str(error).strip().splitlines()[0]
        needs = "a C++ compiler (g++) on the path" if device.type == "cpu" else "its device's compiler, e.g. triton"
        raise EnvironmentProblem(
            f"model.compile=true: torch cannot compile for {device.type}: {said}\n  install {needs}, or leave it out"
        ) from error
