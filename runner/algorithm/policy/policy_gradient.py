"""Policy optimization: grpo, ppo, opd and what their options make of them.

    collect   prompts ─▶ sampler ─▶ reward ─▶ groups of samples              (may run `lag` steps ahead)
    prepare   groups ─▶ one ragged batch ─▶ old, reference, teacher, values ─▶ advantages ─▶ epochs × mini-batches
    losses    policy: clipped surrogate, KL, entropy;  critic: clipped value error;  on one backbone: one loss of both

    reward [N], values [T], KL [T] ──add_advantages──▶ advantages [T] (returns [T])   once per step, before its updates
    teacher, old [T]               ──add_advantages──▶ advantages [T]                 of opd; without old, in the loss
    weight [T] of a mini-batch ──add_aggregation_weights──▶ weights [T]               per optimizer step

Papers: GRPO 2402.03300, PPO 1707.06347, GAE 1506.02438; each part names its own (`runner.algorithm.policy.advantages`,
`losses`, `importance`; `runner.algorithm.kl_divergence`). Legend: N rows, T tokens.

The policy that the ratio is taken to, `old` (`PolicyConfig.old_logprobs_source`):
  one update per step at lag 0     none is needed: the policy is the one that sampled
  lag ≥ 1 without a correction     what the sampler reported: the policy that sampled
  else                             computed by the trainer before the step's first update
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from runner.algorithm import experience_state, rollouts
from runner.algorithm.kl_divergence import KlController
from runner.algorithm.loss_registry import compute_selected, selected_function
from runner.algorithm.policy import advantages, importance
from runner.algorithm.policy.advantages import whiten
from runner.algorithm.policy.config import PolicyConfig
from runner.algorithm.policy.total_loss import losses_by_role, teacher_log_ratio
from runner.algorithm.rollouts import Experience, Group, RolloutCollector, make_experience
from runner.core.batch import Batch, row_of_tokens, select_units, with_tokens, with_totals
from runner.core.errors import EnvironmentProblem, TrainingDiverged
from runner.core.prefix_tree import Branch, Tree, pack_trees
from runner.core.rng import derive_seed
from runner.interfaces import LossFn, Model, Role, Sample, State
from runner.interfaces.learning import AlgorithmInputs
from runner.interfaces.losses import ImportanceWeights

KL_ROUNDING = 1e-5  # equal completions have rewards that differ by the rounding of their KL


class PolicyOptimization:
    """Samples, scores (opd: by its teacher alone), and learns from the difference."""

    def __init__(self, config: PolicyConfig, parts: AlgorithmInputs) -> None:
        assert parts.sampler is not None  # the config's problems() see to it, and to the reward
        assert (parts.reward is not None) == config.needs_reward
        self.config, self.parts = config, parts
        self.temperature = parts.sampler.temperature
        most_turns = 1 if parts.environments is None else parts.environments.max_turns
        self.max_length = float(parts.sampler.max_new_tokens * most_turns)
        own = (parts.sampler, parts.reward, parts.tokenizer, parts.seed, config.group_size)
        self.collector = RolloutCollector(*own, parts.environments, parts.extend)
        if config.kl_estimator != "none" and not config.has_kl:
            text = "algorithm.kl_coef=0: no reference model is loaded, and policy/kl is not measured"
            parts.decide.record_fact("algorithm.kl_estimator", "unused", text)
        if (updates := config.epochs * config.mini_batches) > 1 and not config.has_importance_ratio:
            text = f"it has no importance ratio, so {updates - 1} of {updates} updates of a step are off-policy"
            parts.decide.record_fact("algorithm.policy_loss", config.policy_loss, f"{text}; clip has one")
        self.kl = KlController(config.resolved_options.kl_coef, config.kl_target)
        self.losses: Mapping[Role, LossFn] = losses_by_role(config, lambda: self.kl.coefficient)
        self._health: dict[str, float] = {}

    @property
    def lag(self) -> int:
        """Steps that collection runs ahead."""
        return self.config.lag

    def collect(self, step: int) -> Experience:
        """The step's scored samples; under zero_variance=resample as many rounds as it takes, up to the cap."""
        size, resample = self.config.batch_size, self.config.zero_variance_policy == "resample"
        drawn, round = list[Group](), 0
        for round in range(self.config.max_rounds):
            drawn += self.collector.collect_groups(self.parts.data.take(step, size, round), step, round)
            if not resample or sum(g.has_reward_variance for g in drawn) >= size:
                break
        return make_experience(step, drawn, size, round + 1, contrast=resample)

    def prepare(self, experience: Experience, models: Mapping[Role, Model]) -> Iterator[Batch]:
        """Mini-batches with everything the losses need; all but `weight` is fixed before the first update."""
        batch = self._pack_groups(experience)
        batch = self._add_model_outputs(batch, models)
        batch = mark_dropped_groups(self.config, batch, self.kl.coefficient)
        batch = add_advantages(self.config, batch, self.kl.coefficient).without_tokens("action_mask")
        for epoch in range(self.config.epochs):
            for part in self._mini_batches(batch, experience.step, epoch):
                yield without_dropped_groups(add_aggregation_weights(self.config, part, self.max_length))

    def describe(self, step: int, experience: Experience) -> tuple[Mapping[str, float], Sequence[Sample]]:
        """Reward, lengths, staleness; the coefficient in force; health of the importance weights."""
        found = rollouts.rollout_metrics(experience) | self._health
        if self.config.needs_reward:
            found |= rollouts.reward_metrics(experience)
        if self.config.has_kl:
            found["policy/kl_coef"] = self.kl.coefficient
        return found, list(rollouts.sample_records(experience, self.config.needs_reward, self.collector.tokenizer))

    def observe(self, step: int, values: Mapping[str, float]) -> None:
        """Adapt the KL coefficient. Raises TrainingDiverged if sampler and trainer disagree too much."""
        worst, found = self.config.max_logprob_diff, values.get("mismatch/logprob_diff", 0.0)
        if worst is not None and found > worst:
            raise TrainingDiverged(
                f"step {step + 1}: sampler and trainer differ by {found:.3g} per token (mean |log-probability|), more "
                f"than algorithm.max_logprob_diff={worst}; their weights, data types or sampling options are "
                "different"
            )
        if "policy/kl" in values:
            self.kl.observe(values["policy/kl"], self.config.batch_size * self.config.group_size)

    encode = staticmethod(experience_state.encode_experience)
    decode = staticmethod(experience_state.decode_experience)

    def state_dict(self) -> State:
        """The adaptive coefficient."""
        return {"kl_coef": self.kl.coefficient}

    def load_state_dict(self, state: State) -> None:
        """Restore `state_dict`."""
        self.kl.coefficient = state["kl_coef"]

    def _pack_groups(self, experience: Experience) -> Batch:
        """The groups that are trained on as one batch; `weight` is 1 on what is trained.

        `action_mask` is 1 on all tokens of the policy, also of answers that are scored but left out of the loss.

        Of groups to be dropped, those are in it whose variance is not known yet, and those that the loss counts.
        """
        drop = self.config.zero_variance_policy != "keep" and self.config.kl_location != "reward"
        drop &= not self.config.counts_dropped_groups
        played = [g for g in experience.groups if g.played_samples]
        if not played:
            raise EnvironmentProblem(self._why_no_episode(experience))
        learnt = [g for g in played if g.has_reward_variance or not drop]
        silent = not learnt  # then the step has a gradient of zero, and not no step
        groups = learnt or played[:1]
        trees = [self._tree(group, silent) for group in groups]
        batch = pack_trees(trees, share=self.config.share_prompts, most_tokens=self.config.micro_batch_budget)
        prompts = batch.rows["branch"] < 0
        batch = replace(batch, rows={**batch.rows, "reward": batch.rows["reward"].masked_fill(prompts, torch.nan)})
        if (experts := rollouts.expert_channel(batch, groups)) is not None:
            batch = replace(batch, tokens={**batch.tokens, "experts": experts})
        if self.temperature != 1:
            batch = with_tokens(batch, temperature=torch.full((batch.num_tokens,), self.temperature))
        return batch

    def _why_no_episode(self, experience: Experience) -> str:
        finishes = [one.finish for group in experience.groups for one in group.samples]
        if finishes.count("length") <= len(finishes) // 2:
            return "every episode of the step failed\n  fix the environment"
        text = f"the sampler has room for {self.collector.sampler.max_model_len} tokens; prompts and tools fill it"
        advice = "raise sampler.max_model_len (sampler=vllm), lower data.max_length, or shorten the tool schemas"
        return f"no episode of the step had room for a turn: {text}\n  {advice}"

    def _tree(self, group: Group, silent: bool) -> Tree:
        branches = []
        for one in group.played_samples:
            unscored = self.config.needs_reward and one.reward is None
            left_out = silent or unscored or (self.config.mask_truncated and one.finish == "length")
            for at, row in enumerate(one.rows):
                weight = [0.0] * len(row.ids) if left_out else row.mask
                channels = {"weight": weight, "action_mask": row.mask, "sampled": row.logprobs}
                reward = torch.nan if one.reward is None or at else one.reward
                branches.append(Branch(row.ids, channels, {"reward": reward, "is_extra": float(at > 0)}))
        return Tree(group.prompt.ids, branches)

    def _add_model_outputs(self, batch: Batch, models: Mapping[Role, Model]) -> Batch:
        """The channels that models make: old, importance, reference, teacher, values."""
        config = self.config
        needed: dict[Role, dict[str, str]] = {role: {role: "logprobs"} for role in config.frozen_models()}
        if config.old_logprobs_source == "trainer":
            needed["policy"] = {"old": "logprobs"}
        elif config.old_logprobs_source == "sampler":
            batch = with_tokens(batch, old=batch.tokens["sampled"])
        if (options := config.critic_options) is not None:
            needed.setdefault(options.critic_role, {})["values"] = "values"
        for role, channels in needed.items():  # one pass of each model
            # others choose their own experts: what they say must not depend on who sampled
            scored = batch if role == "policy" else batch.without_tokens("experts")
            found = models[role].forward(scored, frozenset(channels.values()))
            batch = with_tokens(batch, **{channel: found[output] for channel, output in channels.items()})
            if (experts := found.get("experts")) is not None:  # of the pass for `old`, which the update replays
                batch = replace(batch, tokens={**batch.tokens, "experts": experts.cpu()})
        return batch if config.correction == "none" else self._add_importance_weights(batch)

    def _add_importance_weights(self, batch: Batch) -> Batch:
        mask, row = batch.tokens["weight"] != 0, episode_of_tokens(batch)
        level, limit = self.config.resolved_options.correction_level, self.config.max_log_ratio
        log_rho = importance.behavior_log_ratio(batch.tokens["old"], batch.tokens["sampled"], mask, row, level, limit)
        offered = {"log_ratio": lambda: log_rho, "mask": lambda: mask, "row": lambda: row}
        found: ImportanceWeights = compute_selected(self.config, "correction", offered)
        affected, count = map(int, importance.affected_counts(found, mask))
        self._health = {}
        if count:
            size = importance.effective_sample_size(log_rho.exp().double(), mask)
            self._health = {"correction/effective_sample_size": float(size), "correction/clip_frac": affected / count}
        return with_tokens(batch, importance=found.weights)

    def _mini_batches(self, batch: Batch, step: int, epoch: int) -> Iterator[Batch]:
        """The batch in `mini_batches` parts of whole prompts, in another order for each step and epoch."""
        parts = self.config.mini_batches
        if parts == 1:
            yield batch
            return
        of_unit = batch.rows["tree"][_first_row_of_units(batch)]
        trees = int(of_unit[-1]) + 1
        order = np.random.default_rng(derive_seed(self.parts.seed, "mini_batches", step, epoch)).permutation(trees)
        for share in np.array_split(order, parts):
            units = [u for tree in share.tolist() for u in (of_unit == tree).nonzero()[:, 0].tolist()]
            if units:
                yield select_units(batch, units)


def mark_dropped_groups(config: PolicyConfig, batch: Batch, beta: float) -> Batch:
    """Leave out groups whose rewards, less a KL penalty of weight `beta` in them, are all equal.

    Where the loss counts them, or none is left, they have the row channel `dropped` instead.
    """
    if config.zero_variance_policy == "keep":
        return batch
    row = episode_of_tokens(batch)
    rewards = _kl_penalized_rewards(config, batch, row, beta)
    rounding = KL_ROUNDING if config.kl_location == "reward" else 0.0
    dropped = ~advantages.has_variance(rewards, batch.rows["tree"], rounding)
    if config.counts_dropped_groups and not bool(dropped.all()):
        return replace(batch, rows={**batch.rows, "dropped": dropped})
    reward = batch.rows["reward"].masked_fill(dropped, torch.nan)
    batch = with_tokens(batch, weight=batch.tokens["weight"].masked_fill(dropped[row], 0))
    return replace(batch, rows={**batch.rows, "reward": reward})


def without_dropped_groups(part: Batch) -> Batch:
    """The mini-batch with no training in rows that are `dropped`; their tokens stay in its totals."""
    if "dropped" not in part.rows:
        return part
    dropped = part.rows["dropped"][row_of_tokens(part)]
    return with_tokens(part, weight=part.tokens["weight"].masked_fill(dropped, 0))


def add_advantages(config: PolicyConfig, batch: Batch, beta: float) -> Batch:
    """Add the channel `advantages` and, with a critic, `returns`; `beta` weighs a KL in the reward.

    A teacher's are left to the loss where the policy itself stands for `old`.
    """
    mask, row = batch.tokens["weight"] != 0, episode_of_tokens(batch)
    if not config.needs_reward:
        if "old" not in batch.tokens:
            return batch
        return with_tokens(batch, advantages=teacher_log_ratio(batch.tokens["teacher"], batch.tokens["old"]))

    def token_rewards() -> Tensor:
        return advantages.token_level_rewards(_rewards(batch), _kl_penalty(config, batch), mask, row, beta)

    if (options := config.critic_options) is not None:
        values = batch.tokens["values"].double()
        found, returns = advantages.gae(token_rewards(), values, mask, row, gamma=options.gamma, lam=options.lam)
        if options.normalize_advantages:
            found = whiten(found, mask, ddof=options.whiten_ddof or 0)
        return with_tokens(batch, returns=returns, advantages=found)
    offered = {
        "rewards": lambda: _kl_penalized_rewards(config, batch, row, beta),
        "token_rewards": token_rewards,
        "group": lambda: batch.rows["tree"],
        "lengths": lambda: row.bincount(batch.tokens["action_mask"], batch.num_rows).long(),
        "mask": lambda: mask,
        "row": lambda: row,
    }
    found = compute_selected(config, "advantage", offered)
    return with_tokens(batch, advantages=found if selected_function(config, "advantage").per_token else found[row])


def episode_of_tokens(batch: Batch) -> Tensor:
    """The first row of each token's episode, int64 [T].

    So an episode of several rows is one sample, and rewarded once.
    """
    index, is_extra = torch.arange(batch.num_rows), batch.rows["is_extra"] > 0
    first = index.masked_fill(is_extra | (batch.rows["branch"] < 0), 0).cummax(0).values
    return torch.where(is_extra, first, index)[row_of_tokens(batch)]


def _kl_penalized_rewards(config: PolicyConfig, batch: Batch, row: Tensor, beta: float) -> Tensor:
    """Rewards less the KL of all of an answer's tokens, also of one that the loss leaves out, float64 [N]."""
    actions = batch.tokens["action_mask"] != 0
    return advantages.kl_penalized_rewards(_rewards(batch), _kl_penalty(config, batch), actions, row, beta)


def _rewards(batch: Batch) -> Tensor:
    return batch.rows["reward"].double()


def _kl_penalty(config: PolicyConfig, batch: Batch) -> Tensor:
    """The KL in the reward per token, float64 [T]; 0 where there is none."""
    if config.kl_location != "reward":
        return torch.zeros(batch.num_tokens, dtype=torch.float64)
    offered = {
        "logprobs": lambda: batch.tokens["old"],
        "reference_logprobs": lambda: batch.tokens["reference"],
        "ratio": lambda: torch.ones(batch.num_tokens),
        "max_log_ratio": lambda: config.max_log_ratio,
        "mask": lambda: batch.tokens["action_mask"],
    }
    penalty: Tensor = compute_selected(config, "kl_estimator", offered)
    return penalty.double()


def add_aggregation_weights(config: PolicyConfig, part: Batch, max_length: float) -> Batch:
    """The mini-batch with the aggregation's weights, whose denominators run over this optimizer step.

    max_length: most tokens of an answer, over the turns of an episode
    """
    mask, row = part.tokens["weight"], episode_of_tokens(part)
    tree = part.rows["tree"][row]
    rows, prompts = (int(one[mask != 0].bincount().count_nonzero()) for one in (row, tree))
    totals = {**part.count(), "rows": rows, "prompts": prompts}
    offered = {
        "mask": lambda: mask,
        "row": lambda: row,
        "group": lambda: tree,
        "tokens": lambda: totals["tokens"],
        "rows": lambda: totals["rows"],
        "groups": lambda: totals["prompts"],
        "max_length": lambda: max_length,
    }
    weight = compute_selected(config, "loss_aggregation", offered)
    return with_totals(with_tokens(part, weight=weight), totals)


def _first_row_of_units(batch: Batch) -> Tensor:
    """The first row of each unit."""
    _, counts = torch.unique_consecutive(batch.rows["unit"], return_counts=True)
    return torch.cumsum(counts, 0) - counts


def build(config: PolicyConfig, parts: AlgorithmInputs) -> PolicyOptimization:
    """The algorithm over the job's data, sampler and reward."""
    return PolicyOptimization(config, parts)
