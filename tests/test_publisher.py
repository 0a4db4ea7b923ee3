"""The publisher: which version of the weights each step is sampled with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pytest
import torch
from torch import Tensor

from runner.feed import Feed
from runner.protocols import Request, Rollout
from runner.publisher import Publisher


class Remembers:
    """A sampler that keeps what it was given."""

    temperature = 1.0
    max_new_tokens = 1

    def __init__(self) -> None:
        self.tensors: Mapping[str, Tensor] | None = None
        self.version = -1

    def load(self, tensors: Mapping[str, Tensor] | None, version: int) -> None:
        self.tensors, self.version = tensors, version

    def sample(self, requests: Sequence[Request]) -> list[Rollout]:
        raise AssertionError("nothing is sampled here")


@pytest.mark.parametrize("lag", [0, 1, 2, 4])
@pytest.mark.parametrize("first", [0, 3])
def test_a_step_is_sampled_with_exactly_the_weights_that_are_due(lag: int, first: int) -> None:
    weight = torch.tensor([float(first)])
    sampler = Remembers()

    def weights() -> Iterator[tuple[str, Tensor]]:
        yield "w", weight

    publisher = Publisher(weights, sampler, lag)
    seen: dict[int, tuple[int, float]] = {}

    def collect(step: int) -> int:
        publisher.load_for(step)
        value = weight if sampler.tensors is None else sampler.tensors["w"]
        seen[step] = (sampler.version, float(value))
        return step

    publisher.publish(first)
    with Feed(collect, first + 8, lag, encode=lambda _: {}, decode=lambda _: 0) as feed:
        feed.start(first)
        for step in range(first, first + 8):
            feed.take(step)
            weight += 1  # the update
            publisher.publish(step + 1)
            feed.published(step)
    due = {step: max(step - lag, first) for step in range(first, first + 8)}
    assert seen == {step: (version, float(version)) for step, version in due.items()}


def test_no_more_versions_are_kept_than_are_due() -> None:
    publisher = Publisher(lambda: iter([("w", torch.zeros(1))]), Remembers(), 2)
    for version in range(9):
        publisher.publish(version)
    assert sorted(publisher._kept) == [6, 7, 8]
