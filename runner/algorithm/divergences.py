"""Divergences of a student's distributions from its teacher's, in nats.

As beta goes to 0, jsd / beta goes to the forward KL; as it goes to 1, jsd / (1 − beta) goes to the reverse KL: near
both ends jsd itself, and with it its gradient, vanishes.

Legend: S tokens, V events: the vocabulary, or some of it and, as one event, all others. Log-probabilities [S, V] are
finite, in float32 or better; the teacher's are without gradient.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from runner.interfaces.losses import divergence, torch

if TYPE_CHECKING:
    from torch import Tensor


@divergence("forward_kl", paper="Hinton et al. 1503.02531", formula="KL(P ‖ Q)")
def forward_kl(teacher: Tensor, student: Tensor) -> Tensor:
    """Σ P·(log P − log Q), [S]."""
    return (teacher.exp() * (teacher - student)).sum(-1)


@divergence("reverse_kl", paper="MiniLLM 2306.08543", formula="KL(Q ‖ P)")
def reverse_kl(teacher: Tensor, student: Tensor) -> Tensor:
    """Σ Q·(log Q − log P), [S]."""
    return forward_kl(student, teacher)


@divergence("jsd", paper="GKD 2306.13649", formula="beta·KL(P ‖ M) + (1 − beta)·KL(Q ‖ M), M = beta·P + (1 − beta)·Q")
def jsd(
    teacher: Tensor,
    student: Tensor,
    *,
    beta: Annotated[float, Field(gt=0, lt=1, description="Weight of the teacher in the mixture")] = 0.5,
) -> Tensor:
    """The generalised Jensen-Shannon divergence, [S]."""
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * forward_kl(teacher, mixture) + (1 - beta) * forward_kl(student, mixture)
