"""The parts of a job that samples: sampler, reward, environments; each rank does its share."""

from __future__ import annotations

from functools import partial
from typing import Any

from runner.build.parts import build_model, fitting
from runner.decisions import Decisions
from runner.errors import Problem, SpecError
from runner.folder import RunFolder
from runner.parallelism.shared import SharedEnvironments, SharedSampler, shared_reward
from runner.parallelism.world import World
from runner.protocols import Data, Device, Environments, Peers, Reward, Sampler
from runner.registry import default_registry
from runner.spec.job import JobSpec
from runner.spec.suggest import nearest


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
    renaming = f", or the column: 'data.columns={{{meant}: {name}}}'" if hasattr(spec.data, "columns") else ""
    return f"rename the argument{renaming}"


def build_sampler(
    spec: JobSpec, policy: Any, tokenizer: Any, device: Device, world: World, decide: Decisions
) -> Sampler | None:
    """The sampler: over the policy itself at lag 0, over a copy where sampling runs ahead of training."""
    if not spec.algorithm.samples:
        return None
    head = next(iter(spec.algorithm.learners().values()))  # the copy has the heads of the policy, whose weights it gets
    ahead = spec.algorithm.steps_ahead() > 0
    model = build_model(spec, tokenizer, device, decide, head, world.in_copies()) if ahead else policy
    sampler: Sampler = default_registry().factory(spec.sampler)(spec.sampler, model=model, decide=decide)
    _say_room(spec, sampler, decide)
    return SharedSampler(sampler, world.feed_peers, partial(world.whole, model))


def _say_room(spec: JobSpec, sampler: Sampler, decide: Decisions) -> None:
    """Where the policy's turns alone may outgrow the model: the words of the environment come on top."""
    turns = spec.environment.most_turns()
    whole = spec.data.max_length + turns * spec.sampler.answer_tokens()
    if turns > 1 and sampler.longest is not None and whole > sampler.longest:
        asked = f"a prompt and {turns} turns may come to {whole} tokens without what the environment says"
        decide.state("environment", f"episodes end at {sampler.longest} tokens, cut off", asked)


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
    return None if reward is None else shared_reward(reward, world.feed_peers)


def build_environments(spec: JobSpec, peers: Peers, decide: Decisions) -> SharedEnvironments | None:
    """The environments of the thread that has `peers`; None where answers are single turns."""
    made: Environments | None = default_registry().factory(spec.environment)(spec.environment, decide=decide)
    return None if made is None else SharedEnvironments(made.make, made.max_turns, peers)
