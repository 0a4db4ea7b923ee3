"""A calculator as a tool: the worked example of an environment.

policy: calc 12*(3+4)   ──▶   tool: 84   ──▶   policy: 84   (no call: the episode is over)
"""

from __future__ import annotations

from functools import partial
from typing import Any

from runner.core.untrusted_text import NotArithmetic, evaluate
from runner.environment.config import CalculatorConfig
from runner.interfaces import EnvironmentFactory, Observation, Prompt

CALL = "calc "


class Calculator:
    """One episode; it answers in the role `role`."""

    def __init__(self, role: str = "tool") -> None:
        self._role = role

    def reset(self, prompt: Prompt) -> None:
        """Nothing to prepare: every call stands by itself."""

    def step(self, answer: str) -> Observation | None:
        """The value of the expression, or its error; None after the final answer."""
        if not answer.startswith(CALL):
            return None
        try:
            return Observation(self._role, str(evaluate(answer.removeprefix(CALL))[0]))
        except NotArithmetic as error:
            return Observation(self._role, f"error: {error}")


def build(config: CalculatorConfig, **_: Any) -> EnvironmentFactory:
    """A maker of calculators."""
    return EnvironmentFactory(partial(Calculator, config.role), config.max_turns, roles=(config.role,))
