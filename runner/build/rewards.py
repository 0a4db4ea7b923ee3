"""The rewards of a job and of its evaluation, each tried on rows of the data that it scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from runner.build.components import device_op_installer
from runner.core.auto_choices import Decisions
from runner.core.errors import Problem, SpecError
from runner.distributed.work_partition import run_on_rank0
from runner.interfaces import Data, Prompt, RankCollectives, Reward
from runner.parallelism.parallel_context import ParallelContext
from runner.run_dir.folder import RunFolder
from runner.spec.job import JobSpec
from runner.spec.registry import component_source, default_registry
from runner.spec.suggest import nearest_word

if TYPE_CHECKING:
    from runner.parallelism.rollout_partition import PartitionedReward

MakeReward = Callable[[JobSpec, Sequence[Prompt], str], Reward | None]  # of a spec, tried on prompts; its option


def refuse_missing_columns(spec: JobSpec, data: Data) -> None:
    """Raise SpecError for a column that the reward needs and no row has, before the model is loaded."""
    known = data.columns  # of nested ones those of the first row: a dotted name may be in others
    required = [(key, name, name.partition(".")[0]) for key, name in spec.reward.required_columns()]
    missing = [(key, name) for key, name, head in required if name not in known and (head == name or head not in known)]
    if not missing:
        return
    sole = next(iter(data.columns)) if len(data.columns) == len(missing) == 1 else "NAME"
    text = f"no row of the data has a column '{{}}'; columns for rewards: {', '.join(sorted(data.columns)) or 'none'}"
    advice = [_column_advice(spec, key, name, nearest_word(name, data.columns) or sole) for key, name in missing]
    problems = [(key, f"{text.format(name)}; {say}") for (key, name), say in zip(missing, advice, strict=True)]
    raise SpecError([Problem(key, message) for key, message in problems])


def _column_advice(spec: JobSpec, key: str, name: str, meant: str) -> str:
    """What to do about a column that is not there; a function names its columns itself."""
    if not key.endswith(".path"):
        return f"type {key}={meant}"
    renaming = f", or rename the column: 'data.rename_columns={{{meant}: {name}}}'" if spec.data.renames_columns else ""
    return f"rename the argument{renaming}"


def reward_origins(spec: JobSpec) -> dict[str, dict[str, str]]:
    """The option of each reward model of training → what identifies its weights (see `WeightsSource`)."""
    from runner.model import hf
    from runner.model.config import HfConfig

    parts = {f"reward.parts[{at - 1}]" if at else "reward": one for at, one in enumerate(spec.reward.components())}
    paths = {key: str(path) for key, one in parts.items() if one.runs_model and (path := getattr(one, "path", None))}
    weights = {key: hf.find_weights(HfConfig(path=path), f"{key}.path") for key, path in paths.items()}
    return {key: hf.weights_source(one).identity(weights=True) for key, one in weights.items()}


@dataclass(frozen=True, slots=True)
class RewardBuilder:
    """Builds rewards with what they share; user code keeps its log in the run's folder."""

    tokenizer: Any
    world: ParallelContext
    decide: Decisions
    folder: RunFolder

    def build_for_training(self, spec: JobSpec, data: Data) -> PartitionedReward | None:
        """The reward of sampled answers, tried on rows of the data; None where nothing is sampled."""
        if not spec.algorithm.needs_sampler:
            return None
        from runner.reward.trial import ROWS

        return self.build(spec, data.take(0, ROWS), self.world.rollout_peers)

    def build(
        self, spec: JobSpec, prompts: Sequence[Prompt], peers: RankCollectives, option: str = "reward"
    ) -> PartitionedReward | None:
        """The reward for the thread that has `peers`, tried on the prompts, if any; option: that names it."""
        reward: Reward | None = default_registry().factory(spec.reward)(
            spec.reward,
            device=self.world.device.torch_device,
            tokenizer=self.tokenizer,
            seed=spec.seed,
            steps=spec.steps,
            decide=self.decide,
            folder=self.folder.root,
            fit=device_op_installer(self.world.device, self.decide),
            make_encoder=partial(conversation_encoder, date=spec.chat.date),
        )
        if reward is None:
            return None
        from runner.parallelism.rollout_partition import PartitionedReward
        from runner.reward.trial import try_reward

        if prompts and not spec.environment.has_score:  # else a reward reads what only an episode has
            everyone = self.world.world_peers
            run_on_rank0(
                everyone, lambda: try_reward(reward, spec.reward, prompts, self.tokenizer, self.decide, option)
            )
        return PartitionedReward(reward, peers, component_source(spec.reward))


def conversation_encoder(tokenizer: Any, date: str | None) -> Callable[..., list[int]]:
    """Return an encoder of conversations by the tokenizer's chat template, which may show the date."""
    from runner.data.chat import Renderer
    from runner.data.config import ChatConfig

    return Renderer(tokenizer, ChatConfig(date=date)).conversation_ids


@dataclass(frozen=True, slots=True)
class EvaluationRewards:
    """The rewards of evaluation, with a state of their own: evaluation leaves no trace in training.

    A reward model is shared with the job, as it has no state and a second one costs memory.
    """

    spec: JobSpec
    builder: RewardBuilder
    reward: PartitionedReward | None  # of training, which is tried
    built: list[Reward] = field(default_factory=list)

    def build(self, spec: JobSpec, prompts: Sequence[Prompt], option: str) -> Reward | None:
        """The reward of the job or of a set, which `spec` has the components of, tried on its first prompts."""
        from runner.reward.trial import ROWS

        peers, same = self.builder.world.world_peers, self.reward is not None and spec.reward == self.spec.reward
        if self.reward is not None and same and spec.reward.uses_device_model():
            return self.reward.with_peers(peers)
        is_tried = same and spec.data == self.spec.data
        made = self.builder.build(spec, () if is_tried else prompts[:ROWS], peers, option)
        if made is not None:
            self.built.append(made)
        return made

    def close(self) -> None:
        """Close those that were built here."""
        for one in self.built:
            one.close()
