"""The environments of a job and of its evaluation; continuing a conversation by their messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.build.result_check import build_component
from runner.core.auto_choices import Decisions
from runner.core.errors import EnvironmentProblem
from runner.core.tool_formats import Tools
from runner.interfaces import Environments, ExtendConversation, RankCollectives
from runner.interfaces.environments import EpisodeChat, Message
from runner.spec.job import JobSpec

if TYPE_CHECKING:
    from runner.data.chat import Renderer
    from runner.data.config import ChatConfig
    from runner.parallelism.environment_partition import PartitionedEnvironments


@dataclass(slots=True)
class EnvironmentBuilder:
    """Builds environments, and ends all that it has built. folder: where what they print is kept."""

    tokenizer: Any
    decide: Decisions
    folder: Path | None
    built: list[Environments] = field(default_factory=list)

    def build(
        self, spec: JobSpec, peers: RankCollectives, journal: Path | None = None
    ) -> PartitionedEnvironments | None:
        """The environments of the thread that has `peers`; None where answers are single turns.

        journal: folder of the record of episodes that are left out; None = nothing is recorded
        """
        made: Environments | None = build_component(
            spec.environment,
            decide=self.decide,
            folder=self.folder,
            **chat_context(spec.chat, self.tokenizer),
        )
        if made is None:
            return None
        from runner.parallelism.environment_partition import FailureRecord, PartitionedEnvironments

        self.built.append(made)
        record = None if journal is None else FailureRecord(journal / "failed_episodes.jsonl")
        return PartitionedEnvironments(made, peers, record)

    def close(self) -> None:
        """End what they have started."""
        while self.built:
            self.built.pop().close()


def chat_context(chat: ChatConfig, tokenizer: Any) -> dict[str, Callable[[], Any]]:
    """Keywords of an environment's factory: functions that make what conversations become ids with."""
    return {"chat": lambda: _episode_chat(chat, tokenizer), "renderer": lambda: _renderer(chat, tokenizer)}


def _episode_chat(chat: ChatConfig, tokenizer: Any) -> EpisodeChat:
    """What prompts with tools are made with. Raises EnvironmentProblem without a chat template."""
    from runner.inference.chat_prompt import render_chat

    renderer = _renderer(chat, tokenizer)

    def render(messages: Sequence[Message], tools: Tools) -> tuple[tuple[int, ...], str, bool]:
        prompt = render_chat(renderer, messages, tools)
        return prompt.ids, str(tokenizer.decode(list(prompt.ids))), prompt.is_thinking

    return EpisodeChat(render, renderer.template.tool_format)


def _renderer(chat: ChatConfig, tokenizer: Any) -> Renderer:
    if not tokenizer.chat_template:
        raise EnvironmentProblem(
            "an environment needs a chat template, but the tokenizer has none; use an instruct or chat model, or type "
            "chat.template=FILE"
        )
    from runner.data.chat import Renderer

    return Renderer(tokenizer, chat)


def build_extend(
    spec: JobSpec, tokenizer: Any, environments: Environments | None, decide: Decisions
) -> ExtendConversation | None:
    """What continues a conversation by an environment's message; None where there is no environment.

    Raises EnvironmentProblem where the chat template does not write messages of the environment's roles.
    """
    if environments is None:
        return None
    renderer = _renderer(spec.chat, tokenizer)
    for role in environments.roles:
        renderer.extend((), [{"role": role, "content": "observation"}])
    if renderer.template.rewrites_history():
        text = "the template renders an earlier turn differently from the last one"
        decide.record_fact("chat.template", "earlier turns keep the tokens that the policy sampled", text)
    return renderer.extend
