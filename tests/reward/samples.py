"""Answers to score, and what factories are called with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from runner.core.auto_choices import Decisions
from runner.data.chat import Renderer
from runner.interfaces import Completion, Prompt, Reward
from runner.reward.config import RewardConfig
from runner.spec.registry import resolve


def answer(
    text: str, tokens: int = 3, messages: Sequence[Mapping[str, Any]] | None = None, **columns: Any
) -> Completion:
    """One answer of `tokens` tokens to "2+2?"; `messages` make the prompt a conversation."""
    prompt = Prompt((7, 8), "2+2?", None if messages is None else tuple(messages), columns)
    return Completion(prompt, tuple(range(tokens)), text, "stop")


def made(config: RewardConfig, **given: Any) -> Reward:
    """The reward that `config` describes, built as a run builds it."""
    common: dict[str, Any] = {"device": torch.device("cpu"), "tokenizer": None, "seed": 0, "decide": Decisions()}
    common |= {"fit": lambda module: None, "make_encoder": lambda tokenizer: Renderer(tokenizer).conversation_ids}
    reward: Reward = resolve(type(config).factory)(config, **common | given)
    return reward


def scores(config: RewardConfig, *group: Completion) -> list[float | None]:
    """The scores of one group."""
    reward = made(config)
    try:
        [found] = reward.score([group])
    finally:
        reward.close()
    return found
