"""What judges and answers a policy's rollouts: reward, environments; each rank does its share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from runner.build.parts import fitting
from runner.core.auto_choices import Decisions
from runner.core.errors import Problem, SpecError
from runner.interfaces import Data, Device, Environments, Peers, Reward
from runner.parallelism.world import World
from runner.run_dir.folder import RunFolder
from runner.spec.job import JobSpec
from runner.spec.registry import default_registry
from runner.spec.suggest import nearest

if TYPE_CHECKING:
    from runner.parallelism.rollout_partition import SharedEnvironments


def refuse_missing_columns(spec: JobSpec, data: Data) -> None:
    """Raise SpecError for a column that the reward asks for and no row of the data has: before the model is loaded."""
    if not spec.algorithm.samples:
        return
    missing = [(key, name) for key, name in spec.reward.columns() if name not in data.columns]
    if not missing:
        return
    sole = next(iter(data.columns)) if len(data.columns) == len(missing) == 1 else "NAME"
    there = ", ".join(sorted(data.columns)) or "none"
    text = f"no row of the data has a column '{{}}'; columns for rewards: {there}; {{}}"
    problems = [(key, name, _instead(spec, key, name, nearest(name, data.columns) or sole)) for key, name in missing]
    raise SpecError([Problem(key, text.format(name, instead)) for key, name, instead in problems])


def _instead(spec: JobSpec, key: str, name: str, meant: str) -> str:
    """What to do about a column that is not there; a function names its columns itself."""
    if not key.endswith(".path"):
        return f"type {key}={meant}"
    renaming = f", or the column: 'data.columns={{{meant}: {name}}}'" if spec.data.renames_columns else ""
    return f"rename the argument{renaming}"


def build_reward(
    spec: JobSpec, tokenizer: Any, device: Device, world: World, decide: Decisions, folder: RunFolder
) -> Reward | None:
    """The reward; user code keeps its log in the run's folder."""
    if not spec.algorithm.samples:
        return None
    reward: Reward | None = default_registry().factory(spec.reward)(
        spec.reward,
        device=device.torch_device,
        tokenizer=tokenizer,
        seed=spec.seed,
        decide=decide,
        folder=folder.root,
        fit=fitting(device, decide),
    )
    from runner.parallelism.rollout_partition import shared_reward

    return None if reward is None else shared_reward(reward, world.feed_peers)


def build_environments(spec: JobSpec, peers: Peers, decide: Decisions) -> SharedEnvironments | None:
    """The environments of the thread that has `peers`; None where answers are single turns."""
    made: Environments | None = default_registry().factory(spec.environment)(spec.environment, decide=decide)
    if made is None:
        return None
    from runner.parallelism.rollout_partition import SharedEnvironments

    return SharedEnvironments(made.make, made.max_turns, peers)
