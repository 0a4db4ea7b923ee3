"""Losses of preference optimization, per pair (or per judged answer), before any mean.

Legend: P pairs, N judged answers; all float [P] or [N] unless said otherwise.

    *_logprobs     log-probabilities of the chosen and the rejected answer under the policy, summed over its tokens: p
    *_log_ratios   the same minus those under the reference, which has no gradient: d;   D = d_c − d_r
    *_lengths      numbers of the answers' tokens, each at least 1: n

    of judged answers   kto             weight·(1 − sigmoid(±beta·(d − z)))           2402.01306
    of a reward model   bradley_terry   −logsig(rc − rr − margin) + c·(rc + rr)²      center_rewards_coef: 2312.09244

All that the losses with a reference know of the four log-probabilities are the two log-ratios.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from runner.interfaces.losses import PreferenceLosses, preference_loss, torch

if TYPE_CHECKING:
    from torch import Tensor

Beta = Annotated[float, Field(gt=0, description="Factor of the log-ratios, or of the log-probabilities (ipo: tau)")]
LabelSmoothing = Annotated[
    float, Field(ge=0, le=0.5, description="Assumed fraction of flipped labels (robust: below 0.5)")
]
Alpha = Annotated[float, Field(ge=0, description="Weight of the chosen completion's likelihood")]


@preference_loss("sigmoid", paper="DPO 2305.18290", formula="−log σ(beta·(d_c − d_r))")
def sigmoid(chosen_log_ratios: Tensor, rejected_log_ratios: Tensor, *, beta: Beta = 0.1) -> PreferenceLosses:
    """DPO: −logsig(beta·D). Rewards: beta·d."""
    losses = -_log_sigmoid(beta * (chosen_log_ratios - rejected_log_ratios))
    return _with_rewards(losses, beta, chosen_log_ratios, rejected_log_ratios)


@preference_loss(
    "conservative",
    paper="cDPO (E. Mitchell, 2023)",
    formula="−(1 − e)·log σ(beta·(d_c − d_r)) − e·log σ(−beta·(d_c − d_r)), e = label_smoothing",
)
def conservative(
    chosen_log_ratios: Tensor, rejected_log_ratios: Tensor, *, beta: Beta = 0.1, label_smoothing: LabelSmoothing = 0.1
) -> PreferenceLosses:
    """cDPO: a share `label_smoothing` in 0..0.5 of the labels is taken to be flipped. Rewards: beta·d."""
    right, wrong = _both_labels(chosen_log_ratios, rejected_log_ratios, beta)
    losses = (1 - label_smoothing) * right + label_smoothing * wrong
    return _with_rewards(losses, beta, chosen_log_ratios, rejected_log_ratios)


@preference_loss(
    "robust",
    paper="Robust DPO 2403.00409",
    formula="(−(1 − e)·log σ(beta·(d_c − d_r)) + e·log σ(−beta·(d_c − d_r))) / (1 − 2e), e = label_smoothing",
)
def robust(
    chosen_log_ratios: Tensor, rejected_log_ratios: Tensor, *, beta: Beta = 0.1, label_smoothing: LabelSmoothing = 0.1
) -> PreferenceLosses:
    """Robust DPO: unbiased estimate of DPO's loss where a share `label_smoothing` of labels is flipped.

    May be negative. Rewards: beta·d. Raises ValueError unless 0 ≤ label_smoothing < 0.5.
    """
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label smoothing must be at least 0 and below 0.5, not {label_smoothing}")
    right, wrong = _both_labels(chosen_log_ratios, rejected_log_ratios, beta)
    losses = ((1 - label_smoothing) * right - label_smoothing * wrong) / (1 - 2 * label_smoothing)
    return _with_rewards(losses, beta, chosen_log_ratios, rejected_log_ratios)


@preference_loss("hinge", paper="SLiC 2305.10425; RSO 2309.06657", formula="max(0, 1 − beta·(d_c − d_r))")
def hinge(chosen_log_ratios: Tensor, rejected_log_ratios: Tensor, *, beta: Beta = 0.1) -> PreferenceLosses:
    """SLiC on log-ratios, as in RSO: relu(1 − beta·D). Rewards: beta·d."""
    losses = torch.relu(1 - beta * (chosen_log_ratios - rejected_log_ratios))
    return _with_rewards(losses, beta, chosen_log_ratios, rejected_log_ratios)


@preference_loss("ipo", paper="IPO 2310.12036", formula="(d_c − d_r − 1/(2·beta))²")
def ipo(chosen_log_ratios: Tensor, rejected_log_ratios: Tensor, *, beta: Beta = 0.1) -> PreferenceLosses:
    """IPO as in the paper, on summed log-ratios: (D − 1/(2·beta))²; beta is tau. Rewards: beta·d."""
    losses = (chosen_log_ratios - rejected_log_ratios - 1 / (2 * beta)).square()
    return _with_rewards(losses, beta, chosen_log_ratios, rejected_log_ratios)


@preference_loss(
    "ipo_averaged", paper="IPO 2310.12036, per token as in TRL", formula="(d_c/n_c − d_r/n_r − 1/(2·beta))²"
)
def ipo_averaged(
    chosen_log_ratios: Tensor,
    rejected_log_ratios: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    *,
    beta: Beta = 0.1,
) -> PreferenceLosses:
    """IPO on log-ratios per token, as the authors advise and TRL does. Rewards: beta·d/n."""
    return ipo(chosen_log_ratios / chosen_lengths, rejected_log_ratios / rejected_lengths, beta=beta)


@preference_loss("sigmoid_norm", paper="Tulu 3 2411.15124", formula="−log σ(beta·(d_c/n_c − d_r/n_r))")
def sigmoid_norm(
    chosen_log_ratios: Tensor,
    rejected_log_ratios: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    *,
    beta: Beta = 5.0,
) -> PreferenceLosses:
    """Length-normalized DPO of Tulu 3. Rewards: beta·d/n.

    Its beta is 5, as it multiplies log-ratios per token.
    """
    return sigmoid(chosen_log_ratios / chosen_lengths, rejected_log_ratios / rejected_lengths, beta=beta)


@preference_loss("apo_zero", paper="APO 2408.06266", formula="1 − σ(beta·d_c) + σ(beta·d_r)")
def apo_zero(chosen_log_ratios: Tensor, rejected_log_ratios: Tensor, *, beta: Beta = 0.1) -> PreferenceLosses:
    """Raises the chosen, lowers the rejected: for answers better than the policy's own. Rewards: beta·d."""
    losses = torch.sigmoid(-beta * chosen_log_ratios) + torch.sigmoid(beta * rejected_log_ratios)
    return _with_rewards(losses, beta, chosen_log_ratios, rejected_log_ratios)


@preference_loss("apo_down", paper="APO 2408.06266", formula="σ(beta·d_c) + 1 − σ(beta·(d_c − d_r))")
def apo_down(chosen_log_ratios: Tensor, rejected_log_ratios: Tensor, *, beta: Beta = 0.1) -> PreferenceLosses:
    """Lowers both, the rejected more: for answers worse than the policy's own. Rewards: beta·d."""
    difference = chosen_log_ratios - rejected_log_ratios
    losses = torch.sigmoid(beta * chosen_log_ratios) + torch.sigmoid(-beta * difference)
    return _with_rewards(losses, beta, chosen_log_ratios, rejected_log_ratios)


@preference_loss("simpo", paper="SimPO 2405.14734", formula="−log σ(beta·(p_c/n_c − p_r/n_r) − gamma)")
def simpo(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    *,
    beta: Beta = 2.0,
    gamma: Annotated[float, Field(ge=0, description="Target margin of rewards, not divided by beta")] = 1.0,
) -> PreferenceLosses:
    """−logsig(beta·(pc/nc − pr/nr) − gamma). Rewards: beta·p/n.

    gamma is a difference of rewards, as in the paper, where it is about half of beta (2.0 and more); open-instruct's
    option is the quotient gamma/beta.
    """
    chosen, rejected = beta * chosen_logprobs / chosen_lengths, beta * rejected_logprobs / rejected_lengths
    return _with_rewards(-_log_sigmoid(chosen - rejected - gamma), 1, chosen, rejected)


@preference_loss(
    "orpo", paper="ORPO 2403.07691", formula="−p_c/n_c − lam·log σ(log odds_c − log odds_r), odds of exp(p/n)"
)
def orpo(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    *,
    lam: Annotated[float, Field(ge=0, description="Weight of the odds ratio")] = 0.1,
) -> PreferenceLosses:
    """NLL of the chosen plus lam · the odds-ratio loss, per token. Rewards: lam·p/n.

    odds = p/(1 − p) of p = exp(mean log-probability), which is kept below 1 by the dtype's epsilon.
    Departure: TRL's NLL also runs over the prompt's tokens; here, as in the paper, over the answer's.
    """
    chosen, rejected = chosen_logprobs / chosen_lengths, rejected_logprobs / rejected_lengths
    ratio = _log_sigmoid(_log_odds(chosen) - _log_odds(rejected))
    return _with_rewards(-chosen - lam * ratio, lam, chosen, rejected)


@preference_loss("cpo", paper="CPO 2401.08417", formula="−log σ(beta·(p_c − p_r)) − alpha·p_c")
def cpo(
    chosen_logprobs: Tensor, rejected_logprobs: Tensor, *, beta: Beta = 0.1, alpha: Alpha = 1.0
) -> PreferenceLosses:
    """CPO as in the paper (alpha 1): the NLL is the chosen answer's sum. Rewards: beta·p."""
    losses = -_log_sigmoid(beta * (chosen_logprobs - rejected_logprobs)) - alpha * chosen_logprobs
    return _with_rewards(losses, beta, chosen_logprobs, rejected_logprobs)


@preference_loss(
    "cpo_averaged",
    paper="CPO 2401.08417, per token as in its code and TRL",
    formula="−log σ(beta·(p_c − p_r)) − alpha·p_c/n_c",
)
def cpo_averaged(
    chosen_logprobs: Tensor, rejected_logprobs: Tensor, chosen_lengths: Tensor, *, beta: Beta = 0.1, alpha: Alpha = 1.0
) -> PreferenceLosses:
    """CPO as in its authors' code and TRL: the NLL is a mean over tokens. Rewards: beta·p.

    Departure: the mean runs over the pair's chosen tokens, not over those of the whole batch.
    """
    losses = -_log_sigmoid(beta * (chosen_logprobs - rejected_logprobs)) - alpha * chosen_logprobs / chosen_lengths
    return _with_rewards(losses, beta, chosen_logprobs, rejected_logprobs)


def bradley_terry(
    chosen: Tensor, rejected: Tensor, *, margin: Tensor | float = 0.0, center_rewards_coef: float = 0.0
) -> PreferenceLosses:
    """−logsig(rc − rr − margin) + center_rewards_coef·(rc + rr)², [P]. Rewards: the model's scores.

    margin: [P] or one number, how far the scores ought to lie apart (Llama 2, 2307.09288).
    center_rewards_coef: at least 0, 0.01 in 2312.09244; draws the scores of a pair to opposite sides of 0.
    """
    losses = -_log_sigmoid(chosen - rejected - margin) + center_rewards_coef * (chosen + rejected).square()
    return _with_rewards(losses, 1, chosen, rejected)


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


def _with_rewards(losses: Tensor, scale: float, chosen: Tensor, rejected: Tensor) -> PreferenceLosses:
    """The losses, and scale·value as each side's implicit reward."""
    return PreferenceLosses(losses, (scale * chosen).detach(), (scale * rejected).detach())


def _log_sigmoid(value: Tensor) -> Tensor:
    return torch.nn.functional.logsigmoid(value)


def _both_labels(dc: Tensor, dr: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """DPO's loss if the label is right, and if it is wrong."""
    logit = beta * (dc - dr)
    return -_log_sigmoid(logit), -_log_sigmoid(-logit)


def _log_odds(logprob: Tensor) -> Tensor:
    """log(p/(1 − p)) of log p; at p = 1 it would be infinite."""
    below_one = logprob.clamp(max=-torch.finfo(logprob.dtype).eps)
    return below_one - torch.log(-torch.expm1(below_one))
