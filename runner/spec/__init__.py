"""What a user can set. A plug-in takes the config base class of its group from here.

See also `runner.interfaces`.

Nothing here imports torch; each name is imported when it is first used, because a group's base class imports from here.
Modules below this package are private and may change without notice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runner.core.package import lazy_exports

if TYPE_CHECKING:
    from runner.adapter.config import AdapterConfig as AdapterConfig
    from runner.algorithm.base import AlgorithmConfig as AlgorithmConfig
    from runner.algorithm.policy.config import PolicyConfig as PolicyConfig
    from runner.checkpoint.config import CheckpointConfig as CheckpointConfig
    from runner.data.config import DataConfig as DataConfig
    from runner.data.config import SourceConfig as SourceConfig
    from runner.device.config import DeviceConfig as DeviceConfig
    from runner.environment.config import EnvironmentConfig as EnvironmentConfig
    from runner.launch.config import LaunchConfig as LaunchConfig
    from runner.model.config import ModelConfig as ModelConfig
    from runner.optimizer.config import OptimizerConfig as OptimizerConfig
    from runner.parallelism.config import ParallelismConfig as ParallelismConfig
    from runner.reward.base import PooledConfig as PooledConfig
    from runner.reward.base import RewardConfig as RewardConfig
    from runner.sampler.base import SamplerConfig as SamplerConfig
    from runner.sampler.base import SamplingConfig as SamplingConfig
    from runner.sampler.config import TorchSamplerConfig as TorchSamplerConfig
    from runner.schedule.config import ScheduleConfig as ScheduleConfig
    from runner.spec.base import CallbackConfig as CallbackConfig
    from runner.spec.base import ComponentConfig as ComponentConfig
    from runner.spec.base import Config as Config
    from runner.spec.base import Dtype as Dtype
    from runner.spec.base import FloatPair as FloatPair
    from runner.spec.base import Head as Head
    from runner.spec.base import ItemKind as ItemKind
    from runner.spec.base import Names as Names
    from runner.spec.base import Numbers as Numbers
    from runner.spec.job import JobSpec as JobSpec
    from runner.tracker.config import TrackerConfig as TrackerConfig

lazy_exports(globals())
