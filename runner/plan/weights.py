"""The parameters of the job's own model, on the meta device: how many there are, where, and which of them learn.

architecture ──meta──▶ model with its adapter ──by layer──▶ Weights
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from torch import Tensor, nn

from runner.model.flops import MatmulWeights, ModelFlops, attention_widths, is_expert, matmul_weights
from runner.parallelism.experts import refuse_adapters
from runner.plan.model import cut, layers, made, period, samples
from runner.spec.base import Head
from runner.spec.job import JobSpec


@dataclass(frozen=True, slots=True)
class Part:
    """Some of a model's parameters: numbers that learn and that do not, and their bytes."""

    trained: int = 0
    frozen: int = 0
    trained_bytes: int = 0
    frozen_bytes: int = 0

    @property
    def bytes(self) -> int:
        """All its bytes."""
        return self.trained_bytes + self.frozen_bytes

    def gathered(self, size: int) -> int:
        """Bytes of all its numbers where they are gathered to compute with, in a type of so many bytes."""
        return (self.trained + self.frozen) * size

    @property
    def _all(self) -> tuple[int, int, int, int]:
        return self.trained, self.frozen, self.trained_bytes, self.frozen_bytes

    def __add__(self, other: Part) -> Part:
        return Part(*(a + b for a, b in zip(self._all, other._all, strict=True)))

    def __sub__(self, other: Part) -> Part:
        return Part(*(a - b for a, b in zip(self._all, other._all, strict=True)))

    def __mul__(self, times: int) -> Part:
        return Part(*(number * times for number in self._all))

    def __truediv__(self, parts: int) -> Part:
        """The largest of so many parts."""
        return Part(*(ceil(number / parts) for number in self._all))


@dataclass(frozen=True, slots=True)
class Weights:
    """A model's parameters by where they lie: of each decoder layer, without its experts, and those; `first`: the
    embedding; `last`: all else; `tied`: what the head shares with the embedding, and has to have where that is not;
    `flops`: what its operations follow from."""

    layers: tuple[Part, ...]
    experts: tuple[Part, ...]
    first: Part
    last: Part
    tied: Part
    flops: ModelFlops

    @property
    def all(self) -> Part:
        """All of them, once."""
        return sum((*self.layers, *self.experts), self.first + self.last)

    @property
    def total(self) -> int:
        """All its numbers."""
        return self.all.trained + self.all.frozen


def weights(spec: JobSpec, head: Head, architecture: Any, trains: bool = True) -> Weights:
    """The parameters of a model of the job; without `trains`, of a frozen copy. Layers that repeat are counted once."""
    depth = architecture.get_text_config().num_hidden_layers
    low, high = samples(depth, period(architecture, False))
    model = made(spec, head, cut(architecture, min(depth, high)), adapted=trains)
    if trains and spec.parallelism.mesh(spec.launch.world).ep > 1:
        refuse_adapters(model.module)
    plain, experts = ([_part(layer, trains, one) for layer in layers(model)] for one in (False, True))
    embedding, output = model.inner.get_input_embeddings(), model.inner.get_output_embeddings()
    first = _sum(embedding.parameters(), trains)
    last = _sum(model.module.parameters(), trains) - first - sum((*plain, *experts), Part())
    shared = output is not None and {id(p) for p in output.parameters()} & {id(p) for p in embedding.parameters()}
    places = [at if at < high else low + (at - low) % (high - low) for at in range(depth)]
    return Weights(
        layers=tuple(plain[at] for at in places),
        experts=tuple(experts[at] for at in places),
        first=first,
        last=last,
        tied=first if shared else Part(),
        flops=ModelFlops(_matmul_weights(model, places), attention_widths(architecture)),
    )


def _matmul_weights(model: Any, places: Sequence[int]) -> MatmulWeights:
    """Those of a model whose layers are, in this order, the ones at `places` of `model`."""
    counted = [matmul_weights(layer, model.inner) for layer in layers(model)]
    rest = matmul_weights(model.module, model.inner) + sum(counted, MatmulWeights()) * -1
    return sum((counted[at] for at in places), rest)


def _part(layer: nn.Module, trains: bool, experts: bool) -> Part:
    return _sum((p for name, p in layer.named_parameters() if is_expert(name) == experts), trains)


def _sum(parameters: Iterable[Tensor], trains: bool) -> Part:
    found = Part()
    for p in parameters:
        learns = trains and p.requires_grad
        found += Part(p.numel(), 0, p.nbytes, 0) if learns else Part(0, p.numel(), 0, p.nbytes)
    return found
