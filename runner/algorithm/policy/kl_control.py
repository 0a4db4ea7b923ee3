"""The coefficient of the KL penalty: fixed, or adapted towards a target (Ziegler et al., 1909.08593, section 2.2)."""

from __future__ import annotations

from dataclasses import dataclass

HORIZON = 10_000  # samples over which the coefficient may change by about a factor e^0.2


@dataclass(slots=True)
class KlControl:
    """coefficient ← coefficient·(1 + clip(kl/target − 1, ±0.2)·samples/HORIZON); fixed without a target."""

    coefficient: float
    target: float | None

    def observe(self, kl: float, samples: int) -> None:
        """Take in the mean KL per token of a step that learnt from so many samples."""
        if self.target is not None:
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.coefficient *= 1 + error * samples / HORIZON
