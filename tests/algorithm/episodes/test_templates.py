"""Episodes under real chat templates: the policy sees the template's ids, or the job is refused at build."""

from __future__ import annotations

from typing import Any

import pytest

from runner.algorithm.rollouts import RolloutCollector
from runner.build.environments import build_extend
from runner.cli.job_builder import compose_job
from runner.core.auto_choices import Decisions
from runner.core.errors import EnvironmentProblem
from runner.data.chat import Renderer
from runner.interfaces import EnvironmentFactory, Observation, Prompt, Request, Rollout
from tests.algorithm.episodes.test_turns import Keeps
from tests.data.test_renderer import encode_chat, tokenizer_of

NAMES = ("Qwen2.5", "Llama-3", "Gemma-3", "Gemma-4", "Cohere", "Mistral", "GLM-4.5", "Qwen3.5")
REFUSED = {(name, "tool") for name in ("Gemma-3", "Gemma-4", "Cohere", "Mistral")}
REWRITES = {("Qwen3.5", "user")}  # earlier turns, which stay here as the policy wrote them


class Turns:
    """A sampler that writes these ids, turn by turn, and remembers the prompts."""

    temperature, max_new_tokens, max_model_len = 1.0, 64, None

    def __init__(self, *turns: list[int]) -> None:
        self.turns, self.prompts = list(turns), list[list[int]]()

    def sample(self, requests: list[Request]) -> list[Rollout]:
        self.prompts += [list(request.prompt) for request in requests]
        ids = tuple(self.turns.pop(0))
        return [Rollout(ids, (-0.5,) * len(ids), (-0.5,) * len(ids), 7, "stop") for _ in requests]


class Tool:
    """An environment that answers every turn, whatever stands before a call in it (reasoning, a blank)."""

    def __init__(self, role: str) -> None:
        self.role = role

    def reset(self, prompt: Prompt) -> None:
        """Nothing to prepare."""

    def step(self, answer: str) -> Observation:
        assert "calc 12+34" in answer
        return Observation(self.role, "46")


def written(tokenizer: Any, prompt: list[int], messages: list[Any]) -> list[int]:
    """The ids of the last turn, its end included, as they are trained on."""
    row = encode_chat(tokenizer, messages)[-1]
    return list(row.ids[len(prompt) : row.answer[1]])


@pytest.mark.parametrize("role", ["tool", "user"])
@pytest.mark.parametrize("name", NAMES)
def test_the_policy_sees_the_ids_of_the_template(name: str, role: str) -> None:
    spec, tokenizer = compose_job(["+recipe=tool_demo", f"environment.role={role}"]).spec, tokenizer_of(name)
    environments = EnvironmentFactory(lambda: Tool(role), 2, roles=(role,))
    if (name, role) in REFUSED:
        with pytest.raises(EnvironmentProblem, match=r"(?s)messages? of role tool.*environment\.role=user"):
            build_extend(spec, tokenizer, environments, Decisions())
        return
    renderer = Renderer(tokenizer, spec.chat)
    messages = [
        {"role": "user", "content": "12+34"},
        {"role": "assistant", "content": "calc 12+34"},
        {"role": role, "content": "46"},
    ]
    seen = [renderer.control.ids_of(renderer.render_prompt(messages[:end])) for end in (1, 3)]
    turns = [written(tokenizer, seen[0], messages[:2]), tokenizer("46", add_special_tokens=False)["input_ids"]]
    if (name, role) == ("GLM-4.5", "tool"):  # which ends a turn with the token of the next role
        turns[0][-1] = tokenizer.convert_tokens_to_ids("<|observation|>")
    sampler = Turns(*turns)
    extend = build_extend(spec, tokenizer, environments, Decisions())
    collector = RolloutCollector(sampler, Keeps(), tokenizer, 0, 1, environments, extend)
    collector.collect_groups([Prompt(tuple(seen[0]), "12+34", (messages[0],))], 0, 0)
    first, second = sampler.prompts
    assert first == seen[0] and second[: len(first) + len(turns[0])] == [*first, *turns[0]]
    assert "46" in tokenizer.decode(second)
    assert (second == seen[1]) is ((name, role) not in REWRITES)
