"""Says when a step learnt nothing because no group's rewards differed: such a run looks healthy, and stands still."""

from __future__ import annotations

import logging

from runner.callback.base import NoOp
from runner.protocols import StepEnd

log = logging.getLogger("runner")

AGAIN_AFTER = 20  # steps without contrast


class Contrast(NoOp):
    """Warns at the first such step, and at every 20th further one."""

    def __init__(self) -> None:
        self._silent = 0

    def on_step(self, end: StepEnd) -> None:
        """Judge by the step's numbers; a step that learns from equal rewards (zero_variance=keep) is none of them."""
        if end.values.get("reward/zero_variance") != 1.0 or end.values["train/tokens"]:
            return
        self._silent += 1
        if self._silent % AGAIN_AFTER == 1:
            so_far = "" if self._silent == 1 else f", as at {self._silent - 1} steps before"
            log.warning(
                "step %d: in every group all rewards were equal (mean %.4g), so nothing was learnt%s; "
                "look at samples.jsonl, reward, sampler.temperature",
                end.step,
                end.values["reward/mean"],
                so_far,
            )
