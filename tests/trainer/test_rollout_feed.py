"""The feed: which weights each step is collected with, order, errors, and what a checkpoint keeps of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from runner.trainer.loop import ExperienceQueue


def feed_of(collect: Callable[[int], Any], last: int, lag: int) -> ExperienceQueue[Any]:
    """A feed of numbers, which a checkpoint keeps half in JSON and half as a tensor."""
    return ExperienceQueue(
        collect,
        last,
        lag,
        encode=lambda number: {"tens": number // 10, "tensors": {"ones": torch.tensor(number % 10)}},
        decode=lambda state: state["tens"] * 10 + int(state["tensors"]["ones"]),
    )


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_a_step_is_never_collected_before_its_weights_are_published(lag: int) -> None:
    published, seen = [-1], {}
    lock = threading.Lock()

    def collect(step: int) -> int:
        with lock:
            seen[step] = published[0]
        return step * 10

    with feed_of(collect, 8, lag) as feed:
        feed.start(0)
        for step in range(8):
            assert feed.take(step) == step * 10
            with lock:
                published[0] = step
            feed.on_weights_published(step)
    for step, version in seen.items():
        assert version >= step - 1 - lag
    assert sorted(seen) == list(range(8))


def test_lag_collects_ahead_but_not_further() -> None:
    started: list[int] = []
    with feed_of(lambda s: started.append(s) or s, 100, 2) as feed:  # type: ignore[func-returns-value]
        feed.start(0)
        feed.take(0)
        feed.take(1)
        feed.take(2)
        assert started == [0, 1, 2]
        feed.on_weights_published(0)
        feed.take(3)
        assert started == [0, 1, 2, 3]


@pytest.mark.parametrize("lag", [0, 1])
def test_an_error_in_collection_reaches_the_loop(lag: int) -> None:
    def collect(step: int) -> int:
        if step == 2:
            raise ValueError("broken item")
        return step

    with feed_of(collect, 5, lag) as feed, pytest.raises(ValueError, match="broken item"):
        feed.start(0)
        for step in range(5):
            feed.take(step)
            feed.on_weights_published(step)


def test_it_starts_in_the_middle() -> None:
    with feed_of(lambda s: s, 7, 1) as feed:
        feed.start(5)
        assert [feed.take(5), feed.take(6)] == [5, 6]


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_what_was_collected_ahead_is_kept_and_not_collected_again(lag: int) -> None:
    weights = [0]
    with feed_of(lambda step: 100 * weights[0] + step, 20, lag) as feed:
        feed.start(0)
        for step in range(4):
            feed.take(step)
            weights[0] = step + 1
            feed.on_weights_published(step)
        state = feed.state_dict()
        wanted = [feed.take(step) for step in range(4, 5 + lag)]
    again: list[int] = []
    with feed_of(lambda step: again.append(step) or 100 * weights[0] + step, 20, lag) as resumed:  # type: ignore[func-returns-value]
        resumed.load_state_dict(state)
        resumed.start(4)
        assert [resumed.take(step) for step in range(4, 5 + lag)] == wanted
    assert sorted(state["steps"]) == [str(step) for step in range(4, 5 + lag)] if lag else not state["steps"]
    assert again == ([4] if lag == 0 else []), "only what no checkpoint kept is collected again"


def test_a_longer_run_goes_on_behind_what_was_kept() -> None:
    with feed_of(lambda step: step, 3, 2) as feed:
        feed.start(0)
        for step in range(3):
            feed.take(step)
            feed.on_weights_published(step)
        state = feed.state_dict()
    with feed_of(lambda step: step, 9, 2) as longer:
        longer.load_state_dict(state)
        longer.start(3)
        assert [longer.take(step) for step in (3, 4, 5)] == [3, 4, 5]
