"""The job spec: everything that defines a run, frozen, and knowing neither torch nor hydra."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from runner.adapter.config import AdapterConfig
from runner.algorithm.config import AlgorithmConfig
from runner.checkpoint.config import CheckpointConfig
from runner.data.config import ChatConfig, DataConfig
from runner.device.config import DeviceConfig
from runner.environment.config import EnvironmentConfig
from runner.launch.config import LaunchConfig
from runner.model.config import ModelConfig
from runner.optimizer.config import OptimizerConfig
from runner.parallelism.config import ParallelismConfig
from runner.reward.config import RewardConfig
from runner.sampler.config import SamplerConfig
from runner.schedule.config import ScheduleConfig
from runner.spec.base import CallbackConfig, Config, Dtype
from runner.spec.evaluation import EvaluationConfig as EvaluationConfig
from runner.spec.tinker import TinkerConfig
from runner.tracker.config import TrackerConfig

RECIPE = "recipe:"  # init_from=recipe:NAME: a recipe that is run first
CONFIG_DIR = " --config-dir "  # recipe:NAME --config-dir FOLDER: with this folder of the job's command line
AUTO_NAME = "auto"
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,79}")


class WatchConfig(Config):
    """Hang detection, device statistics, and rollouts that are logged."""

    hang_timeout_s: float = Field(
        default=1800.0,
        gt=0,
        description="Seconds without progress in a step before all thread stacks are written to stacks.log.",
    )
    device_stats_interval_s: float = Field(
        default=10.0,
        ge=0,
        description="Seconds between samples of device utilization, memory, temperature and power; 0 = none.",
    )
    logged_rollouts: int = Field(default=2, ge=0, description="Rollouts per step that are written to samples.jsonl.")


class CallbacksConfig(Config):
    """Callbacks, built in or of plug-ins, any number of them: name → options."""

    model_config = ConfigDict(json_schema_extra={"additionalProperties": {"type": "object"}})  # whatever is installed

    @property
    def by_name(self) -> dict[str, CallbackConfig]:
        """The callbacks by name, in the order in which they were chosen."""
        return {name: getattr(self, name) for name in type(self).model_fields}

    def problems(self, job: Any) -> list[tuple[str, str]]:
        return [problem for config in self.by_name.values() for problem in config.problems(job)]


class JobSpec(Config):
    """One run. `job_model` narrows each group to the union of its registered components."""

    name: Annotated[str, Field(pattern=rf"^{NAME.pattern}$")] = Field(
        default=AUTO_NAME, description="Name of the run; part of its folder's name. auto = from model and data."
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="Seed of all random streams.")
    steps: int = Field(default=100, ge=1, description="Number of steps of the loop.")
    epochs: float | None = Field(
        default=None, gt=0, description="Epochs over the training data, used instead of steps; null = use steps."
    )
    init_from: str | None = Field(
        default=None,
        description="Initial weights: a run, an export, or recipe:NAME (it runs first); null = the model's.",
    )
    strict: bool = Field(
        default=False,
        description="Make a fallback from what is requested (kernel, dtype) an error; what auto and null choose is "
        "printed.",
    )
    device: DeviceConfig
    parallelism: ParallelismConfig
    launch: LaunchConfig
    model: ModelConfig
    adapter: AdapterConfig
    data: DataConfig
    chat: ChatConfig = Field(default_factory=ChatConfig, description="Chat template and loss mask of conversations.")
    algorithm: AlgorithmConfig
    sampler: SamplerConfig
    reward: RewardConfig
    environment: EnvironmentConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    tracker: TrackerConfig
    checkpoint: CheckpointConfig
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig, description="Held-out evaluation.")
    watch: WatchConfig = Field(default_factory=WatchConfig, description="Hang detection and device statistics.")
    tinker: TinkerConfig = Field(default_factory=TinkerConfig, description="The server of run tinker.")
    callbacks: CallbacksConfig = Field(default_factory=CallbacksConfig, description="Callbacks by name.")

    def problems(self, job: Any) -> list[tuple[str, str]]:
        if self.epochs is None or not self.data.is_mixture:
            return []
        why = "with data.mixture_weights each source has its own epochs"
        return [("epochs", f"{why}; set steps instead, or leave out data.mixture_weights")]

    def episode_tokens(self) -> int:
        """Maximum tokens after a prompt: the environment's limit, or all turns without its messages."""
        turns = self.sampler.answer_tokens() * self.environment.most_turns()
        return self.environment.episode_token_limit() or turns

    def stored_dtype(self, *, trains: bool = True) -> Dtype:
        """The data type that a model's own weights are stored in; without `trains`, of a reference model."""
        return self.optimizer.weights_dtype if trains and self.adapter.trains_base else self.model.compute_dtype
