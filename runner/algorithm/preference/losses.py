"""Losses of preference optimisation, per pair (or per judged answer), before any mean.

Legend: P pairs, N judged answers; all float [P] or [N] unless said otherwise.

    pc, pr    log-probabilities of the chosen and the rejected answer under the policy, summed over its tokens
    dc, dr    the same minus those under the reference (which has no gradient): log-ratios
    nc, nr    numbers of the answers' tokens, each at least 1
    D         dc − dr.   beta > 0, 0.1 unless the paper says otherwise;   logsig = log sigmoid

    with a reference                                                            paper
    sigmoid          −logsig(beta·D)                                            DPO 2305.18290
    conservative     (1 − e)·(−logsig(beta·D)) + e·(−logsig(−beta·D))           cDPO, E. Mitchell 2023
    robust           ((1 − e)·(−logsig(beta·D)) − e·(−logsig(−beta·D)))/(1 − 2e)   2403.00409
    hinge            relu(1 − beta·D)                                           SLiC 2305.10425, RSO 2309.06657
    ipo              (D − 1/(2·beta))²                                          2310.12036
    ipo_averaged     (dc/nc − dr/nr − 1/(2·beta))²                              the same, per token (TRL)
    sigmoid_norm     −logsig(beta·(dc/nc − dr/nr))                              Tulu 3 2411.15124
    apo_zero         1 − sigmoid(beta·dc) + sigmoid(beta·dr)                    2408.06266
    apo_down         sigmoid(beta·dc) + 1 − sigmoid(beta·D)                     2408.06266
    kto              weight·(1 − sigmoid(±beta·(d − z)))                        2402.01306

    without one
    simpo            −logsig(beta·(pc/nc − pr/nr) − gamma)                      2405.14734
    orpo             −pc/nc − lam·logsig(log odds_c − log odds_r)               2403.07691
    cpo              −logsig(beta·(pc − pr)) − alpha·pc                         2401.08417
    cpo_averaged     −logsig(beta·(pc − pr)) − alpha·pc/nc                      the same, per token (its code, TRL)

    of a reward model
    bradley_terry    −logsig(rc − rr − margin) + c·(rc + rr)²                   centring: 2312.09244

All that the losses with a reference know of the four log-probabilities are the two differences dc and dr.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class PairLosses(NamedTuple):
    """losses [P]; the implicit rewards of the chosen and the rejected answers [P], detached."""

    losses: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor


def sigmoid(dc: Tensor, dr: Tensor, *, beta: float) -> PairLosses:
    """DPO: −logsig(beta·D). Rewards: beta·d."""
    return _pair(-F.logsigmoid(beta * (dc - dr)), beta * dc, beta * dr)


def conservative(dc: Tensor, dr: Tensor, *, beta: float, label_smoothing: float) -> PairLosses:
    """cDPO: a share `label_smoothing` in 0..0.5 of the labels is taken to be flipped. Rewards: beta·d."""
    right, wrong = _both_ways(dc, dr, beta)
    return _pair((1 - label_smoothing) * right + label_smoothing * wrong, beta * dc, beta * dr)


def robust(dc: Tensor, dr: Tensor, *, beta: float, label_smoothing: float) -> PairLosses:
    """Robust DPO: an unbiased estimate of DPO's loss where a share `label_smoothing` of the labels is flipped.

    May be negative. Rewards: beta·d. Raises ValueError unless 0 ≤ label_smoothing < 0.5.
    """
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label smoothing must be at least 0 and below 0.5, not {label_smoothing}")
    right, wrong = _both_ways(dc, dr, beta)
    losses = ((1 - label_smoothing) * right - label_smoothing * wrong) / (1 - 2 * label_smoothing)
    return _pair(losses, beta * dc, beta * dr)


def hinge(dc: Tensor, dr: Tensor, *, beta: float) -> PairLosses:
    """SLiC on log-ratios, as in RSO: relu(1 − beta·D). Rewards: beta·d."""
    return _pair(F.relu(1 - beta * (dc - dr)), beta * dc, beta * dr)


def ipo(dc: Tensor, dr: Tensor, *, beta: float) -> PairLosses:
    """IPO as in the paper, on summed log-ratios: (D − 1/(2·beta))²; beta is the paper's tau. Rewards: beta·d."""
    return _pair((dc - dr - 1 / (2 * beta)).square(), beta * dc, beta * dr)


def ipo_averaged(dc: Tensor, dr: Tensor, nc: Tensor, nr: Tensor, *, beta: float) -> PairLosses:
    """IPO on log-ratios per token, as the authors advise and TRL does. Rewards: beta·d/n."""
    return ipo(dc / nc, dr / nr, beta=beta)


def sigmoid_norm(dc: Tensor, dr: Tensor, nc: Tensor, nr: Tensor, *, beta: float) -> PairLosses:
    """Length-normalised DPO of Tulu 3; its beta is 5, since it multiplies log-ratios per token. Rewards: beta·d/n."""
    return sigmoid(dc / nc, dr / nr, beta=beta)


def apo_zero(dc: Tensor, dr: Tensor, *, beta: float) -> PairLosses:
    """Raises the chosen and lowers the rejected: for answers better than the policy's own. Rewards: beta·d."""
    return _pair(torch.sigmoid(-beta * dc) + torch.sigmoid(beta * dr), beta * dc, beta * dr)


def apo_down(dc: Tensor, dr: Tensor, *, beta: float) -> PairLosses:
    """Lowers both, the rejected more: for answers worse than the policy's own. Rewards: beta·d."""
    return _pair(torch.sigmoid(beta * dc) + torch.sigmoid(-beta * (dc - dr)), beta * dc, beta * dr)


def simpo(pc: Tensor, pr: Tensor, nc: Tensor, nr: Tensor, *, beta: float, gamma: float) -> PairLosses:
    """−logsig(beta·(pc/nc − pr/nr) − gamma). Rewards: beta·p/n.

    gamma is a difference of rewards, as in the paper, where it is about half of beta (2.0 and more); open-instruct's
    option is the quotient gamma/beta.
    """
    chosen, rejected = beta * pc / nc, beta * pr / nr
    return _pair(-F.logsigmoid(chosen - rejected - gamma), chosen, rejected)


def orpo(pc: Tensor, pr: Tensor, nc: Tensor, nr: Tensor, *, lam: float) -> PairLosses:
    """NLL of the chosen plus lam times the odds-ratio loss, both of log-probabilities per token. Rewards: lam·p/n.

    odds = p/(1 − p) of p = exp(mean log-probability), which is kept below 1 by the dtype's epsilon.
    Departure: TRL's NLL also runs over the prompt's tokens; here, as in the paper, over the answer's.
    """
    chosen, rejected = pc / nc, pr / nr
    ratio = F.logsigmoid(_log_odds(chosen) - _log_odds(rejected))
    return _pair(-chosen - lam * ratio, lam * chosen, lam * rejected)


def cpo(pc: Tensor, pr: Tensor, *, beta: float, alpha: float) -> PairLosses:
    """CPO as in the paper (alpha 1): the NLL is the chosen answer's sum. Rewards: beta·p."""
    return _pair(-F.logsigmoid(beta * (pc - pr)) - alpha * pc, beta * pc, beta * pr)


def cpo_averaged(pc: Tensor, pr: Tensor, nc: Tensor, *, beta: float, alpha: float) -> PairLosses:
    """CPO as in its authors' code and TRL: the NLL is a mean over tokens. Rewards: beta·p.

    Departure: the mean runs over the pair's chosen tokens, not over those of the whole batch.
    """
    return _pair(-F.logsigmoid(beta * (pc - pr)) - alpha * pc / nc, beta * pc, beta * pr)


def bradley_terry(
    chosen: Tensor, rejected: Tensor, *, margin: Tensor | float = 0.0, centring: float = 0.0
) -> PairLosses:
    """−logsig(rc − rr − margin) + centring·(rc + rr)², of a reward model's scores [P]. Rewards: the scores.

    margin: [P] or one number, how far the scores ought to lie apart (Llama 2, 2307.09288).
    centring: at least 0, 0.01 in 2312.09244; draws the scores of a pair to opposite sides of 0.
    """
    losses = -F.logsigmoid(chosen - rejected - margin) + centring * (chosen + rejected).square()
    return _pair(losses, chosen, rejected)


def kto_baseline(total: Tensor, count: Tensor | int) -> Tensor:
    """z = max(0, mean of the log-ratios of mismatched answers), 0-d, detached (KTO 2402.01306).

    total, count: sum of the log-ratios of answers to other prompts than their own, and their number.
    """
    return (total / count).clamp(min=0).detach()


def kto(
    log_ratio: Tensor,
    good: Tensor,
    z: Tensor,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """(losses [N], rewards beta·d [N], detached) of judged answers  (KTO 2402.01306).

        good:  desirable_weight·(1 − sigmoid(beta·(d − z)))      bad:  undesirable_weight·(1 − sigmoid(beta·(z − d)))

    log_ratio: d; good: bool [N]; z: 0-d, without gradient (`kto_baseline`). The weights (lambda_D, lambda_U of the
    paper) make up for unequal numbers of good and bad answers.
    """
    excess = beta * (log_ratio - z)
    gain = desirable_weight * torch.sigmoid(-excess)
    harm = undesirable_weight * torch.sigmoid(excess)
    return torch.where(good, gain, harm), (beta * log_ratio).detach()


def _pair(losses: Tensor, chosen: Tensor, rejected: Tensor) -> PairLosses:
    return PairLosses(losses, chosen.detach(), rejected.detach())


def _both_ways(dc: Tensor, dr: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """DPO's loss if the label is right, and if it is wrong."""
    logit = beta * (dc - dr)
    return -F.logsigmoid(logit), -F.logsigmoid(-logit)


def _log_odds(logprob: Tensor) -> Tensor:
    """log(p/(1 − p)) of log p; at p = 1 it would be infinite."""
    below_one = logprob.clamp(max=-torch.finfo(logprob.dtype).eps)
    return below_one - torch.log(-torch.expm1(below_one))
