"""What a plug-in's component returns is checked before it is used, and names the plug-in's file and function."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import pytest
import torch

from runner.build.components import build_tokenizer
from runner.build.data import build_data
from runner.build.result_check import build_component
from runner.build.rewards import RewardBuilder
from runner.cli.job_builder import compose_job
from runner.core.auto_choices import Decisions
from runner.core.errors import EnvironmentProblem, SpecError
from runner.data.config import DemoConfig
from runner.data.demo import build as build_demo
from runner.distributed.work_partition import SingleProcess
from runner.interfaces import EnvironmentFactory, Observation, Prompt, Request, SamplerWrapper
from runner.interfaces.rewards import GroupScorer, GroupScores, ScoringFailures
from runner.reward.config import RewardConfig, SumConfig
from runner.run_dir.folder import RunFolder
from runner.sampler.config import TorchSamplerConfig
from runner.sampler.torch import TorchSampler
from runner.spec import AdapterConfig, EnvironmentConfig, OptimizerConfig
from runner.testing.components import build_tiny_model
from tests.reward.samples import answer
from tests.reward.test_trial import SMALL
from tests.small import UNJUDGED

HERE = "tests.build.test_result_check"
WAY: Callable[..., Any] = print  # what the component under test does; see `way`


class Adapter(AdapterConfig):
    """An adapter."""

    factory: ClassVar[str] = f"{HERE}:adapter"
    name: Literal["mine"] = "mine"


class Optimizer(OptimizerConfig):
    """An optimizer."""

    factory: ClassVar[str] = f"{HERE}:optimizer"
    name: Literal["mine"] = "mine"


class Environment(EnvironmentConfig):
    """An environment."""

    factory: ClassVar[str] = f"{HERE}:environment"
    name: Literal["mine"] = "mine"

    def most_turns(self) -> int:
        return 3


class Sampler(TorchSamplerConfig):
    """A sampler."""

    factory: ClassVar[str] = f"{HERE}:sampler"


class Data(DemoConfig):
    """Data."""

    factory: ClassVar[str] = f"{HERE}:data"


def adapter(config: Any, model: Any, *, decide: Any) -> Any:
    return WAY(model)


class Reward(RewardConfig):
    """A reward, which may be a part of a sum."""

    factory: ClassVar[str] = f"{HERE}:reward"
    name: Literal["wrong"] = "wrong"


def reward(config: Any, **_: Any) -> Any:
    return GroupScorer(lambda group: WAY(group), ScoringFailures("reward=wrong", 8, ""))


def optimizer(config: Any, *, parameters: Mapping[str, Any], decide: Any) -> Any:
    return WAY(list(parameters.values()))


class Sgd(torch.optim.SGD):
    """Steps to what is not finite."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(torch.nan)


class Double(torch.optim.SGD):
    """Changes the data type of what it trains."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data.double()


def environment(config: Any, **_: Any) -> Any:
    return WAY()


class Talker:
    """An environment that says something else than an observation."""

    def reset(self, prompt: Prompt) -> None:
        pass

    def step(self, answer: str) -> Any:
        return WAY(answer)


def talkers(config: Any, **_: Any) -> EnvironmentFactory:
    return EnvironmentFactory(Talker, 3)


class Wrapper(SamplerWrapper):
    """A sampler whose answers are changed."""

    def sample(self, requests: Any) -> Any:
        return WAY(super().sample(requests))


def sampler(config: Any, *, model: Any, decide: Any) -> Any:
    return Wrapper(TorchSampler(config, model=model, decide=decide))


def data(config: Any, **context: Any) -> Any:
    return WAY(build_demo(config, **context))


@pytest.fixture
def way(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], None]:
    """Set what the component does."""
    return lambda do: monkeypatch.setitem(globals(), "WAY", do)


Way = Callable[[Callable[..., Any]], None]


def poison(model: Any) -> Any:
    with torch.no_grad():
        next(model.module.parameters()).fill_(torch.inf)
    return model


@pytest.mark.parametrize(
    ("do", "fault"),
    [
        (lambda model: None, "expected the model with its adapter.* got NoneType"),
        (lambda model: model.module, "expected the model with its adapter"),
        (lambda model: model.module.requires_grad_(False) and model, "nothing is trainable"),
        (poison, "parameters are not finite"),
    ],
)
def test_an_adapter_is_a_model_that_can_be_trained(do: Callable[..., Any], fault: str, way: Way) -> None:
    way(do)
    with pytest.raises(SpecError, match=fault) as caught:
        build_component(Adapter(), build_tiny_model(), decide=Decisions())
    assert caught.value.exit_code == 2 and caught.value.problems[0].key == "adapter"
    assert re.search(r"test_result_check\.py:\d+, adapter\).*check_adapter", str(caught.value))
    way(lambda model: model)
    model = build_tiny_model()
    assert build_component(Adapter(), model, decide=Decisions()) is model


@pytest.mark.parametrize(
    ("do", "fault", "name"),
    [
        (lambda ps: ps, "expected a torch optimizer, got list", "optimizer"),
        (lambda ps: torch.optim.SGD(ps[:1], lr=1.0), "each of 2 parameters is in one group.* got 1", "optimizer"),
        (lambda ps: Sgd(ps, lr=1.0), "its first step made parameters that are not finite", "Sgd.step"),
        (lambda ps: Double(ps, lr=1.0), "its first step changed the shape or data type", "Double.step"),
    ],
)
def test_an_optimizer_has_each_parameter_and_keeps_it_finite(
    do: Callable[..., Any], fault: str, name: str, way: Way
) -> None:
    def steps() -> torch.optim.Optimizer:
        parameters = {name: torch.nn.Parameter(torch.ones(2)) for name in "ab"}
        made: torch.optim.Optimizer = build_component(Optimizer(), parameters=parameters, decide=Decisions())
        made.step()
        return made

    way(do)
    with pytest.raises(SpecError, match=fault) as caught:
        steps()
    assert re.search(rf"test_result_check\.py:\d+, {name}\)", str(caught.value))
    way(lambda ps: torch.optim.SGD(ps, lr=1.0))
    made = steps()
    made.param_groups[0]["params"][0].data.fill_(torch.nan)
    made.step()  # which is looked at once


@pytest.mark.parametrize(
    ("do", "fault"),
    [
        (lambda: None, r"expected EnvironmentFactory\(make, max_turns\), got None"),
        (lambda: EnvironmentFactory(Talker, 4), r"most_turns\(\) is 3, and the factory has max_turns=4"),
    ],
)
def test_an_environment_factory_has_the_turns_of_its_config(do: Callable[..., Any], fault: str, way: Way) -> None:
    way(do)
    with pytest.raises(SpecError, match=fault):
        build_component(Environment(), decide=Decisions())


@pytest.mark.parametrize("said", ["words", {"role": "tool"}, Observation("tool", 3), 0])  # type: ignore[arg-type]
def test_an_environment_says_an_observation_or_nothing(said: Any, way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Environment, "factory", f"{HERE}:talkers")
    made = build_component(Environment(), decide=Decisions())
    for fine in (Observation("tool", "a"), None):
        way(lambda answer, fine=fine: fine)
        assert made.start_episode(Prompt((1,), "")).step("a") == fine
    way(lambda answer: said)
    with pytest.raises(SpecError, match=r"test_result_check\.py:\d+, Talker\.step\): step\(\) returns Observation"):
        made.start_episode(Prompt((1,), "")).step("a")


@pytest.mark.parametrize(
    ("do", "fault"),
    [
        (lambda found: found[:1], "expected a Rollout for each of 2 requests"),
        (lambda found: [one.ids for one in found], "expected a Rollout"),
        (lambda found: [replace(one, ids=(10**6,) * len(one.ids)) for one in found], "expected 1 to 3 ids from 0 to"),
        (lambda found: [replace(one, ids=-torch.tensor(one.ids)) for one in found], "ids from 0 to"),
        (lambda found: [replace(one, ids=one.ids * 9) for one in found], "expected 1 to 3 ids"),
        (lambda found: [replace(one, logprobs=one.logprobs[1:]) for one in found], "expected finite logprobs"),
        (
            lambda found: [replace(one, raw_logprobs=(float("nan"),) * len(one.ids)) for one in found],
            "expected finite logprobs and raw_logprobs",
        ),
        (lambda found: [replace(one, finish="eos") for one in found], "expected finish stop or length"),
    ],
)
def test_a_sampler_gives_an_answer_of_the_vocabulary_to_each_request(
    do: Callable[..., Any], fault: str, way: Way
) -> None:
    made = build_component(Sampler(max_new_tokens=3), model=build_tiny_model(), decide=Decisions())
    made.load_weights(None, 1)
    requests = [Request((5, 6), seed, 3, seed, raw=True) for seed in range(2)]
    way(do)
    with pytest.raises(SpecError, match=fault) as caught:
        made.sample(requests)
    assert re.search(r"test_result_check\.py:\d+, Wrapper\.sample\)", str(caught.value))
    way(lambda found: found)
    assert len(made.sample(requests)) == 2


def with_items(change: Callable[[Any], Any]) -> Callable[..., Any]:
    def make(made: Any) -> Any:
        take = made.take
        made.take = lambda step, count, round=0: [change(item) for item in take(step, count, round)]
        return made

    return make


@pytest.mark.parametrize(
    ("do", "fault"),
    [
        (lambda made: [], "fingerprint of the data: expected str"),
        (with_items(lambda item: item.ids), "expected 8 items TokenizedExample"),
        (with_items(lambda item: replace(item, ids=(-1, *item.ids[1:]))), "expected ids from 0 to"),
        (with_items(lambda item: replace(item, ids=[0.5])), "ids from 0 to"),
        (with_items(lambda item: replace(item, weights=item.weights[1:])), "one finite weight"),
        (
            with_items(lambda item: replace(item, weights=(float("nan"),) * len(item.ids))),
            "one finite weight",
        ),
    ],
)
def test_data_give_items_of_the_vocabulary(do: Callable[..., Any], fault: str, way: Way) -> None:
    spec = compose_job(UNJUDGED).spec
    tokenizer = build_tokenizer(spec, Decisions())
    way(do)
    with pytest.raises(SpecError, match=fault):
        build_data(spec, tokenizer, Decisions(), Data(items=64, held_out=8))
    way(lambda made: made)
    assert len(build_data(spec, tokenizer, Decisions(), Data(items=64, held_out=8))) == 64


@pytest.mark.parametrize("config", [Reward(), SumConfig(parts=[{"name": "wrong"}])])
def test_a_reward_gives_each_completion_a_score(config: RewardConfig, way: Way, tmp_path: Path) -> None:
    way(lambda group: GroupScores([math.nan for _ in group]))
    world: Any = SimpleNamespace(device=SimpleNamespace(torch_device=torch.device("cpu")))
    builder = RewardBuilder(None, world, Decisions(), RunFolder(tmp_path))
    made = builder.build(compose_job(SMALL).spec.model_copy(update={"reward": config}), (), SingleProcess())
    assert made is not None
    with pytest.raises(
        EnvironmentProblem, match=rf"^reward=wrong \({__file__}:\d+, reward\): score\(\) returned \[\[nan"
    ):
        made.score([[answer("a")]])
    made.close()


def test_components_of_this_project_are_not_wrapped() -> None:
    spec = compose_job([*SMALL, "reward=exact"]).spec
    made = build_component(spec.sampler, model=build_tiny_model(), decide=Decisions())
    assert type(made) is TorchSampler
