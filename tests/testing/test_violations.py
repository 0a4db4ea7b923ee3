"""Each check fails on a component that breaks its contract, and says what is wrong."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.core.errors import SpecError
from runner.spec import ComponentConfig
from runner.testing import (
    check_adapter,
    check_callback,
    check_config,
    check_data,
    check_environment,
    check_optimizer,
    check_reward,
    check_sampler,
    check_schedule,
    check_tracker,
)
from tests.testing import broken

HEAVY = """
import numpy
from typing import ClassVar, Literal
from runner.spec import RewardConfig

class Heavy(RewardConfig):
    "A reward."
    factory: ClassVar[str] = "heavy_plugin:Heavy"
    name: Literal["heavy"] = "heavy"
    summable: ClassVar[bool] = False
"""


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (broken.Undescribed(), "no description of sharpness"),
        (broken.Unnamed(), "must name the component"),
        (broken.Elsewhere(), "no_such_factory, which is not there"),
    ],
)
def test_configs(config: ComponentConfig, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        check_config(config)


def test_a_config_that_imports_something_heavy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "heavy_plugin.py").write_text(HEAVY)
    heavy = importlib.import_module("heavy_plugin").Heavy
    with pytest.raises(AssertionError, match=r"heavy_plugin imports numpy; every command reads it"):
        check_config(heavy())


def reward(way: str) -> None:
    check_reward(broken.BrokenReward(way=way), {"a": 1.0, "b": 0.0}, columns={"answer": "a"})


def environment(way: str) -> None:
    check_environment(broken.BrokenEnvironment(way=way), ["one", "two", "three"])


def optimizer(way: str) -> None:
    check_optimizer(broken.BrokenOptimizer(way=way, lr=0.01))


def schedule(way: str) -> None:
    check_schedule(broken.BrokenSchedule(way=way), steps=5)


def adapter(way: str) -> None:
    check_adapter(broken.BrokenAdapter(way=way))


def sampler(way: str) -> None:
    check_sampler(broken.BrokenSampler(way=way))


def data(way: str) -> None:
    check_data(broken.BrokenData(way=way, items=32, held_out=2))


def prompts(way: str) -> None:
    check_data(broken.BrokenData(way=way, items=128, held_out=2), "prompts")


def callback(way: str) -> None:
    check_callback(broken.BrokenCallback(way=way))


def tracker(way: str) -> None:
    check_tracker(broken.BrokenTracker(way=way))


@pytest.mark.parametrize(
    ("check", "way", "said"),
    [
        (reward, "flat", "a list for each group"),
        (reward, "wrong", r"are to score \[1.0, 0.0\], and scored \[0.5, 0.5\]"),
        (reward, "nan", "no NaN or infinity"),
        (reward, "drifts", "are to score"),
        (reward, "zero", "which is not the score 0"),
        (environment, "shared", "at the same time disturb one another"),
        (environment, "continues", "two episodes with the same turns differ"),
        (environment, "text", r"step\(\) returns Observation"),
        (environment, "turns", r"most_turns\(\) is 2, and the factory has max_turns=4"),
        (optimizer, "up", "took the loss from"),
        (optimizer, "own rate", "at learning rate 0 the parameters"),
        (optimizer, "unused", "a parameter without gradient moved"),
        (optimizer, "some", "parameters is in one group, and in no other"),
        (optimizer, "hidden", "after a resume .* differ"),
        (schedule, "high", "from 0 to 1"),
        (schedule, "nan", "from 0 to 1"),
        (schedule, "zero", "every factor is 0"),
        (schedule, "memory", "depends on earlier calls"),
        (adapter, "none", "nothing is trainable"),
        (adapter, "all", "not its base any more"),
        (sampler, "few", "a Rollout for each of 5 requests, not 1"),
        (sampler, "order", "not on the other requests"),
        (sampler, "version", "version is that of the last load"),
        (sampler, "zeros", r"raw_logprobs at temperature 1.0: the model has \[-"),
        (sampler, "sure", "4 different answers have a total probability of 4"),
        (sampler, "seed", "same prompt and different seeds returned the same ids"),
        (sampler, "score", r"score\(\) at temperature 1: the model has \[-"),
        (sampler, "prefix", "without sampler/"),
        (data, "order", "depends on what was taken before"),
        (data, "fingerprint", "two fingerprints"),
        (prompts, "round", "must use another order than round 0; got that of round 0"),
        (prompts, "shifted", "16 of its first 16 items are among the first 32 of round 0"),
        (prompts, "next", "16 of its first 16 items are among the first 32 of round 0"),
        (prompts, "chance", "round=1.* depends on earlier calls, or on chance"),
        (callback, "state", r"after a resume the state is \{'seen': 2\}, and without one \{'seen': 4\}"),
        (callback, "set", "JSON values"),
        (callback, "removes", r"took away \['train/loss'\]"),
        (callback, "integer", "numbers of type float"),
        (tracker, "secret", "a secret of the spec is in mine.json"),
        (tracker, "text", "the lines to print"),
    ],
)
def test_a_violation_is_named(check: Callable[[str], None], way: str, said: str) -> None:
    with pytest.raises((AssertionError, SpecError), match=said):
        check(way)


def test_a_callback_that_keeps_its_state() -> None:
    made = check_callback(broken.BrokenCallback(), steps=3)
    assert made.state_dict() == {"seen": 3}
