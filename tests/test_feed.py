"""The feed: which weights each step is collected with, order, and errors."""

from __future__ import annotations

import threading

import pytest

from runner.feed import Feed


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_a_step_is_never_collected_before_its_weights_are_published(lag: int) -> None:
    published, seen = [-1], {}
    lock = threading.Lock()

    def collect(step: int) -> int:
        with lock:
            seen[step] = published[0]
        return step * 10

    with Feed(collect, 0, 8, lag) as feed:
        for step in range(8):
            assert feed.take(step) == step * 10
            with lock:
                published[0] = step
            feed.published(step)
    for step, version in seen.items():
        assert version >= step - 1 - lag
    assert sorted(seen) == list(range(8))


def test_lag_collects_ahead_but_not_further() -> None:
    started: list[int] = []
    with Feed(lambda s: started.append(s) or s, 0, 100, 2) as feed:  # type: ignore[func-returns-value]
        feed.take(0)
        feed.take(1)
        feed.take(2)
        assert started == [0, 1, 2]
        feed.published(0)
        feed.take(3)
        assert started == [0, 1, 2, 3]


@pytest.mark.parametrize("lag", [0, 1])
def test_an_error_in_collection_reaches_the_loop(lag: int) -> None:
    def collect(step: int) -> int:
        if step == 2:
            raise ValueError("broken item")
        return step

    with Feed(collect, 0, 5, lag) as feed, pytest.raises(ValueError, match="broken item"):
        for step in range(5):
            feed.take(step)
            feed.published(step)


def test_it_starts_in_the_middle() -> None:
    with Feed(lambda s: s, 5, 7, 1) as feed:
        assert [feed.take(5), feed.take(6)] == [5, 6]
