"""The components of this project pass the checks that plug-ins are given."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner import build
from runner.adapter.config import AdapterConfig, LoraConfig, NoAdapterConfig
from runner.cli.job_builder import compose_job
from runner.core.auto_choices import Decisions
from runner.core.signals import StopSignal
from runner.data.config import DemoConfig, FileConfig
from runner.environment.config import CalculatorConfig
from runner.interfaces import Observation
from runner.launch.run_records import RunRecords
from runner.optimizer.config import AdamW8bitConfig, AdamWConfig, MuonConfig, OptimizerConfig, SgdConfig
from runner.reward.base import RewardConfig
from runner.reward.config import (
    CountdownConfig,
    ExactConfig,
    FormatConfig,
    FunctionConfig,
    LengthConfig,
    NumericConfig,
    SumConfig,
)
from runner.run_dir.folder import RunFolder
from runner.sampler.config import TorchSamplerConfig
from runner.schedule.config import ConstantConfig, CosineConfig, LinearConfig, ScheduleConfig, WsdConfig
from runner.spec.base import ComponentConfig, ItemKind
from runner.spec.registry import Registry, default_registry, resolve
from runner.testing import (
    check_adapter,
    check_algorithm,
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
from runner.tracker.config import NoTrackerConfig, TensorboardConfig, TrackerConfig, WandbConfig
from runner.tracker.console import Console
from runner.trainer.config import StopWhenConfig
from tests.testing import broken

SUM = SumConfig(parts=({"name": "exact"}, {"name": "length", "target": 2, "weight": 0.5}))
FUNCTION = "def score(completions, answer, **more):\n    return [float(a == b) for a, b in zip(completions, answer)]\n"


@pytest.mark.parametrize(
    ("config", "scores"),
    [
        (ExactConfig(), {"12": 1.0, " 12 ": 1.0, "13": 0.0}),
        (FormatConfig(pattern="[0-9]+"), {"12": 1.0, "twelve": 0.0}),
        (LengthConfig(target=2), {"12": 0.0, "1": -0.5}),
        (NumericConfig(), {"it is 12": 1.0, "13": 0.0}),
        (CountdownConfig(), {"4*3": 1.0, "3+4": 0.0}),
        (SUM, {"12": 1.0, "1": -0.25}),
    ],
    ids=lambda value: value.name if isinstance(value, RewardConfig) else "",
)
def test_rewards(config: RewardConfig, scores: dict[str, float | None]) -> None:
    check_reward(config, scores, columns={"answer": "12", "numbers": [3, 4], "target": 12})


def test_a_reward_of_the_users_file(workdir: Path) -> None:
    Path("mine.py").write_text(FUNCTION)
    check_reward(FunctionConfig(path="mine.py:score"), {"12": 1.0, "1": 0.0}, columns={"answer": "12"})


def test_a_reward_that_reads_token_ids() -> None:
    config = broken.BrokenReward(way="decodes")
    check_reward(config, {"12 é": 1.0, "21": 0.0}, prompt="sort 21: ", columns={"answer": "12"})


def test_the_calculator() -> None:
    said = check_environment(CalculatorConfig(), ["calc 3*4", "calc x", "12"])
    assert said[0] == Observation("tool", "12")


OPTIMIZERS = [AdamWConfig(), SgdConfig(), SgdConfig(momentum=0.9), AdamW8bitConfig(), MuonConfig()]


@pytest.mark.parametrize("config", OPTIMIZERS, ids=lambda one: one.name)
def test_optimizers(config: OptimizerConfig) -> None:
    if config.name == "adamw8bit" and importlib.util.find_spec("torchao") is None:
        pytest.skip("torchao is not installed")
    check_optimizer(config)


SCHEDULES = [ConstantConfig(warmup_steps=3), LinearConfig(), CosineConfig(), WsdConfig()]


@pytest.mark.parametrize("config", SCHEDULES, ids=lambda one: one.name)
def test_schedules(config: ScheduleConfig) -> None:
    assert len(check_schedule(config, steps=20)) == 20


@pytest.mark.parametrize("config", [NoAdapterConfig(), LoraConfig(rank=2)], ids=lambda one: one.name)
def test_adapters(config: AdapterConfig) -> None:
    check_adapter(config)


SAMPLERS = [{}, {"top_k": 1}, {"temperature": 0.01, "top_p": 0.9}, {"max_new_tokens": 1}]


@pytest.mark.parametrize("options", SAMPLERS, ids=str)
def test_the_torch_sampler(options: dict[str, Any]) -> None:
    check_sampler(TorchSamplerConfig(**options))


@pytest.mark.parametrize("kind", ["sft", "pairs", "judged", "prompts"])
def test_demo_data(kind: ItemKind) -> None:
    check_data(DemoConfig(items=128, held_out=4), kind)


def test_data_of_a_file(workdir: Path) -> None:
    Path("rows.jsonl").write_text("".join(f'{{"prompt": "{i}", "completion": "{i + 1}"}}\n' for i in range(5)))
    check_data(FileConfig(path="rows.jsonl"))


TRACKERS = [NoTrackerConfig(), TensorboardConfig(), pytest.param(WandbConfig(), marks=pytest.mark.slow)]


@pytest.mark.parametrize("config", TRACKERS, ids=lambda one: one.name)
def test_trackers(config: TrackerConfig) -> None:
    check_tracker(config)


@pytest.mark.parametrize("words", ["sft_demo", "grpo_demo sampler.max_new_tokens=6 reward=length reward.target=3"])
def test_algorithms(words: str, workdir: Path) -> None:
    steps = check_algorithm(*f"+recipe={words}".split())
    assert len(steps) == 3 and "train/loss" in steps[0]


def test_every_config_that_needs_no_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "runner.testing.components._heavy_imports", lambda module: ""
    )  # test_house.py looks at all at once
    registry = default_registry()
    classes = [cls for group in registry.groups() for cls in registry.classes(group).values()]
    for cls in classes:
        if not any(info.is_required() for info in cls.model_fields.values()):
            check_config(cls())


JOB = (
    *("+recipe=tool_demo", "model=tiny", "model.hidden_size=32", "model.layers=2", "data.items=64", "data.held_out=8"),
    *("init_from=null", "tracker=none", "callbacks=stop_when", "callbacks.stop_when.metric=train/loss"),
    "callbacks.stop_when.patience=2",
)
CHECKED = ("reward", "environment", "data", "sampler", "adapter", "optimizer", "schedule", "tracker", "callbacks")


def test_checks_pass_the_keywords_that_a_job_passes(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: dict[str, set[str]] = {}

    def recorded(registry: Registry, config: ComponentConfig) -> Callable[..., Any]:
        def make(*given: Any, **keywords: Any) -> Any:
            calls[config.group] = keywords.keys() | {str(len(given))}
            return resolve(type(config).factory)(*given, **keywords)

        return make

    monkeypatch.setattr(Registry, "factory", recorded)
    monkeypatch.setattr("runner.testing.components._heavy_imports", lambda module: "")
    spec, folder, decide = compose_job(JOB).spec, RunFolder(workdir), Decisions()
    made = build.build(spec, folder, build.build_store(spec, folder), decide, StopSignal(), build.OutputSinks())
    RunRecords(spec, folder, 1, decide).open(0, Console(folder.log, io.StringIO()))
    made.world.close()
    of_job = dict(calls)
    calls.clear()
    check_reward(ExactConfig(), {"12": 1.0}, columns={"answer": "12"})
    check_environment(CalculatorConfig(), ["12"])
    check_data(DemoConfig(items=16, held_out=4))
    check_sampler(TorchSamplerConfig())
    check_adapter(NoAdapterConfig())
    check_optimizer(SgdConfig())
    check_schedule(ConstantConfig())
    check_tracker(NoTrackerConfig())
    check_callback(StopWhenConfig(metric="train/loss", patience=2))
    assert {group: calls[group] for group in CHECKED} == {group: of_job[group] for group in CHECKED}
