"""What samples are worth and how much each token weighs: the channels that the losses of policy optimisation read.

    reward [N], values [T], KL [T] ──valued──▶ advantages [T] (returns [T])      once per step, before the first update
    teacher, old [T]               ──valued──▶ advantages [T]                    of opd; without old, of the loss
    weight [T] of a mini-batch ──weighted──▶ the aggregation's weights [T]       per optimizer step

Legend: N rows, T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runner.algorithm.policy import advantages, aggregation, kl, returns
from runner.algorithm.policy.base import PolicyConfig
from runner.algorithm.policy.moments import whiten
from runner.algorithm.policy.worth import FromCritic, FromRewards, FromTeacher
from runner.batch import Batch, row_of_tokens, with_tokens, with_totals


def valued(config: PolicyConfig, batch: Batch, beta: float) -> Batch:
    """The batch with the channel `advantages` and, with a critic, `returns`; `beta` weighs a KL in the reward.

    A teacher's are left to the loss where the policy itself stands for `old`.
    """
    mask = batch.tokens["weight"] != 0
    match config.worth:
        case FromTeacher():
            if "old" not in batch.tokens:
                return batch
            return with_tokens(batch, advantages=from_teacher(batch.tokens["teacher"], batch.tokens["old"]))
        case FromCritic() as wanted:
            placed = _placed(batch, _penalty(config, batch), beta)
            values = batch.tokens["values"].double()
            row = row_of_tokens(batch)
            found, back = returns.gae(placed, values, mask, row, gamma=wanted.gamma, lam=wanted.lam)
            return with_tokens(batch, returns=back, advantages=whiten(found, mask) if wanted.whiten else found)
        case FromRewards("reinforce_pp", gamma):
            placed = _placed(batch, _penalty(config, batch), beta)
            found = returns.discounted_returns(placed, mask, row_of_tokens(batch), gamma)
            return with_tokens(batch, advantages=whiten(found, mask))
        case FromRewards() as wanted:
            penalty, row = _penalty(config, batch), row_of_tokens(batch)
            rewards = returns.penalised_rewards(batch.rows["reward"].double(), penalty, mask, row, beta)
            return with_tokens(batch, advantages=_of_groups(wanted, batch, rewards, mask))


def from_teacher(teacher: Tensor, student: Tensor) -> Tensor:
    """log p_teacher − log p_student, [T], without gradient: the reward of on-policy distillation."""
    return teacher - student.detach()


def _penalty(config: PolicyConfig, batch: Batch) -> Tensor:
    """The KL in the reward per token, float64 [T]; 0 where there is none."""
    if config.kl_in != "reward":
        return torch.zeros(batch.num_tokens, dtype=torch.float64)
    return kl.k1(batch.tokens["old"], batch.tokens["reference"]).double()


def _placed(batch: Batch, penalty: Tensor, beta: float) -> Tensor:
    """The reward of each token, float64 [T]: its row's on the last one, less the penalty on each."""
    rewards, mask = batch.rows["reward"].double(), batch.tokens["weight"] != 0
    return returns.token_rewards(rewards, penalty, mask, row_of_tokens(batch), beta)


def _of_groups(wanted: FromRewards, batch: Batch, rewards: Tensor, mask: Tensor) -> Tensor:
    """Advantages [T] from rewards [N] by what the group makes of them."""
    group, row = batch.rows["tree"], row_of_tokens(batch)
    if wanted.advantage == "batch_std":
        return advantages.batch_std(rewards, group, eps=1e-6)[row]
    if wanted.advantage == "opo":
        lengths = mask.new_zeros(batch.num_rows, dtype=torch.int64).index_add(0, row, mask.long())
        return advantages.opo(rewards, group, lengths)[row]
    if wanted.advantage == "reinforce_pp_baseline":
        found = advantages.group_mean(rewards, group)[row]
        return whiten(found, mask)
    plain = {
        "group_mean_std": lambda: advantages.group_mean_std(rewards, group, eps=1e-6),
        "group_mean": lambda: advantages.group_mean(rewards, group),
        "leave_one_out": lambda: advantages.leave_one_out(rewards, group),
        "none": lambda: advantages.no_baseline(rewards),
    }
    return plain[wanted.advantage]()[row]


def weighted(config: PolicyConfig, part: Batch, longest: float) -> Batch:
    """The mini-batch with the aggregation's weights, whose denominators run over this optimizer step.

    longest: the constant of seq_mean_token_sum_norm, in tokens
    """
    mask, row = part.tokens["weight"], row_of_tokens(part)
    tree = part.rows["tree"][row]
    prompts = {"prompts": int(torch.unique(tree[mask != 0]).numel())}
    totals = {**part.count(), **prompts}
    name = config.aggregation
    weight = {
        "token_mean": lambda: aggregation.token_mean(mask, totals["tokens"]),
        "seq_mean_token_mean": lambda: aggregation.seq_mean_token_mean(mask, row, totals["rows"]),
        "seq_mean_token_sum": lambda: aggregation.seq_mean_token_sum(mask, totals["rows"]),
        "seq_mean_token_sum_norm": lambda: aggregation.seq_mean_token_sum_norm(mask, totals["rows"], longest),
        "prompt_mean": lambda: aggregation.prompt_mean(mask, tree, totals["prompts"]),
    }[name]()
    return with_totals(with_tokens(part, weight=weight), totals)
