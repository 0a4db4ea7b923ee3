"""Divergences of a student from its teacher, token by token, over the whole vocabulary.

    logits ──log_softmax(logits / temperature)──▶ log-probabilities [S, V] ──(top-k)──▶ [S, k + 1] ──divergence──▶ [S]

    name        P = teacher, Q = student                              paper
    forward_kl  KL(P ‖ Q) = Σ P·(log P − log Q)                        Hinton et al. 1503.02531
    reverse_kl  KL(Q ‖ P) = Σ Q·(log Q − log P)                        MiniLLM 2306.08543
    jsd         β·KL(P ‖ M) + (1 − β)·KL(Q ‖ M), M = β·P + (1 − β)·Q   GKD 2306.13649, section 3

As β goes to 0, jsd / β goes to the forward KL; as it goes to 1, jsd / (1 − β) goes to the reverse KL: near both ends
jsd itself, and with it its gradient, vanishes.

Legend: S tokens, V vocabulary. Log-probabilities are finite, in float32 or better; the teacher's are without gradient.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def forward_kl(teacher: Tensor, student: Tensor) -> Tensor:
    """KL(teacher ‖ student) in nats, [S], of log-probabilities [S, V]."""
    return (teacher.exp() * (teacher - student)).sum(-1)


def reverse_kl(teacher: Tensor, student: Tensor) -> Tensor:
    """KL(student ‖ teacher) in nats, [S], of log-probabilities [S, V]."""
    return forward_kl(student, teacher)


def jsd(teacher: Tensor, student: Tensor, *, beta: float) -> Tensor:
    """The generalised Jensen-Shannon divergence in nats, [S], of log-probabilities [S, V]; beta between 0 and 1."""
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * forward_kl(teacher, mixture) + (1 - beta) * forward_kl(student, mixture)


def tempered(logits: Tensor, temperature: float) -> Tensor:
    """log-softmax of logits / temperature, [S, V], in float32 or better."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.log_softmax(wide / temperature, dim=-1)


def coarse(teacher: Tensor, student: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Both distributions over the teacher's k likeliest tokens and, as one further event, all others: [S, k + 1] each.

    They stay distributions, so that a divergence of them is never negative, never above that of the whole vocabulary,
    and blind only to how the others share their probability. With k of at least V they come back as they are.
    """
    if k >= teacher.shape[-1]:
        return teacher, student
    top = teacher.topk(k, dim=-1).indices
    return _lumped(teacher, top), _lumped(student, top)


def _lumped(logprobs: Tensor, top: Tensor) -> Tensor:
    rest = logprobs.scatter(-1, top, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([logprobs.gather(-1, top), rest], dim=-1)
