"""Routing of a mixture of experts: how a model counts, records and replays the experts of tokens.

Legend: T tokens, M layers with experts, E experts of each, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

Replays = Literal["sampler", "old"]


@dataclass(slots=True)
class ExpertCounts:
    """Routing of some tokens in training, which can be added over micro-batches and ranks.

    tokens: int64 [], routed; chosen: int64 [M, E], tokens that each expert got; probability: float32 [M, E], Σ of the
    router's softmax; given: int64 [], tokens whose experts were replayed; differ: int64 [M], those of them that the
    router itself would have sent to other experts
    """

    tokens: Tensor
    chosen: Tensor
    probability: Tensor
    given: Tensor
    differ: Tensor

    @classmethod
    def zeros(cls, layers: int, experts: int, device: torch.device) -> ExpertCounts:
        """Counts of no tokens."""
        shapes: tuple[tuple[int, ...], ...] = ((), (layers, experts), (layers, experts), (), (layers,))
        kinds = (torch.int64, torch.int64, torch.float32, torch.int64, torch.int64)
        return cls(*(torch.zeros(shape, dtype=kind, device=device) for shape, kind in zip(shapes, kinds, strict=True)))

    def __add__(self, other: ExpertCounts) -> ExpertCounts:
        return ExpertCounts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def to_cpu(self) -> ExpertCounts:
        """The same on the CPU."""
        return ExpertCounts(*(getattr(self, f.name).cpu() for f in fields(self)))

    @property
    def idle(self) -> Tensor:
        """Experts that no token was sent to, bool [M, E]."""
        return self.chosen == 0

    def metrics(self) -> dict[str, float]:
        """The metrics of a step, of counts on the CPU; see docs/metrics.md.

        load_balance_loss: E · Σ f·P, f an expert's share of the routes and P its mean probability, averaged over
        layers; 1 where both are even (Fedus et al., 2101.03961, equation 4, with k = 1 as Mixtral's is divided by k).
        """
        if not int(self.tokens):
            return {}
        share = self.chosen / self.chosen.sum(1, keepdim=True)
        balance = share.shape[1] * (share * self.probability / self.tokens).sum(1)
        found = {
            "router/load_balance_loss": float(balance.mean()),
            "router/max_load": float(share.max()) * share.shape[1],
            "router/idle_experts": float(self.idle.sum()),
        }
        if int(self.given):
            differ = self.differ / self.given
            found |= {
                "router/replay_frac": float(self.given / self.tokens),
                "router/replay_diff_frac": float(differ.mean()),
                "router/replay_diff_max": float(differ.max()),
            }
        return found


class ExpertRouting(Protocol):
    """The routers of a model.

    replays: whose experts a batch's channel `experts` has (integers [T, M, k], -1 = the router's own), which routers
    take: the sampler's, or those of the pass for the old log-probabilities; None = the channel is ignored;
    records: whether the experts of each pass are kept for `last_experts`; counts_tokens: whether they are counted;
    token_experts: of the last pass without gradient, int16 [T, M, k], where `replays` is old
    """

    replays: Replays | None
    records: bool
    token_experts: Tensor
    counts_tokens: bool

    def replay(self, forward: Callable[..., Any], *, experts: Tensor | None = None, **keywords: Any) -> Any: ...

    def keep_token_experts(self, run: Callable[..., Tensor]) -> None: ...  # see `token_experts`

    def last_experts(self, rows: int, columns: int) -> Tensor: ...  # of the last pass, int16 [rows, columns, M, k]

    def pop_counts(self) -> ExpertCounts | None: ...  # since the last call; None = no token was routed
