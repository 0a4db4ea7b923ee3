"""What torchrun says of a job's processes, as overrides; and who is a rank."""

from __future__ import annotations

import pytest

from runner.errors import EnvironmentProblem
from runner.launch import torchrun
from runner.place import Place, alone

MEETING = {"MASTER_ADDR": "node-0", "MASTER_PORT": "29500"}


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in MEETING.items():
        monkeypatch.setenv(name, value)


def test_the_layout_is_what_was_started(meeting: None) -> None:
    assert torchrun.layout(Place(0, 4, 0, 4), ["steps=3"]) == ["launch.devices=4", "launch.nodes=1"]
    assert torchrun.layout(Place(0, 8, 0, 4), []) == [
        "launch.devices=4",
        "launch.nodes=2",
        "launch.node=0",
        "launch.address=node-0:29500",
    ]


def test_a_layout_that_is_typed_must_be_the_same(meeting: None) -> None:
    assert torchrun.layout(Place(0, 4, 0, 4), ["launch.devices=4"])
    with pytest.raises(EnvironmentProblem, match=r"launch\.devices=3: torchrun has started 4 × 1 processes"):
        torchrun.layout(Place(0, 4, 0, 4), ["launch.devices=3"])
    with pytest.raises(EnvironmentProblem, match="as many on each machine"):
        torchrun.layout(Place(0, 5, 0, 3), [])


def test_a_rank_is_who_has_all_of_the_variables(monkeypatch: pytest.MonkeyPatch, meeting: None) -> None:
    assert not torchrun.is_rank()
    for name, value in Place(1, 2, 1, 2).variables().items():
        monkeypatch.setenv(name, value)
    assert torchrun.is_rank()
    for name, value in Place().variables().items():
        monkeypatch.setenv(name, value)
    assert not torchrun.is_rank(), "torchrun with one process"


def test_what_a_rank_starts_is_none() -> None:
    own = {**MEETING, **Place(1, 2, 1, 2).variables(), "TORCHELASTIC_RUN_ID": "x"}
    assert alone({**own, "HOME": "here"}) == {"HOME": "here"}
