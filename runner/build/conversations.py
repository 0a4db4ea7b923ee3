"""The environments of a job, and what continues their conversations, checked before the model is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from runner.core.auto_choices import Decisions
from runner.core.errors import EnvironmentProblem
from runner.data.chat import Renderer
from runner.interfaces import EnvironmentFactory, ExtendConversation, RankCollectives
from runner.spec.job import JobSpec
from runner.spec.registry import default_registry

if TYPE_CHECKING:
    from runner.parallelism.rollout_partition import PartitionedEnvironments


def build_environments(spec: JobSpec, peers: RankCollectives, decide: Decisions) -> PartitionedEnvironments | None:
    """The environments of the thread that has `peers`; None where answers are single turns."""
    made: EnvironmentFactory | None = default_registry().factory(spec.environment)(spec.environment, decide=decide)
    if made is None:
        return None
    from runner.parallelism.rollout_partition import PartitionedEnvironments

    return PartitionedEnvironments(made.make, made.max_turns, peers, roles=made.roles)


def build_extend(
    spec: JobSpec, tokenizer: Any, environments: EnvironmentFactory | None, decide: Decisions
) -> ExtendConversation | None:
    """What continues a conversation by an environment's message; None where there is no environment.

    Raises EnvironmentProblem where the chat template does not write messages of the environment's roles.
    """
    if environments is None:
        return None
    if not tokenizer.chat_template:
        raise EnvironmentProblem(
            "an environment needs a chat template, and the tokenizer has none; use an instruct or chat model, or "
            "chat.template=FILE"
        )
    renderer = Renderer(tokenizer, spec.chat)
    for role in environments.roles:
        renderer.extend((), {"role": role, "content": "observation"})
    if renderer.rewrites_history():
        text = "the template writes an earlier turn in another way than the last one"
        decide.record_fact("chat.template", "earlier turns stay as the policy wrote them", text)
    return renderer.extend
