"""Episodes of several turns: what is learnt, what is context, and that no token is made twice."""

from __future__ import annotations

from typing import Any

import pytest

from runner.algorithm.rollouts import Collector
from runner.algorithm.turns import Turns
from runner.environment import calculator
from runner.environment.config import CalculatorConfig
from runner.errors import EnvironmentProblem
from runner.model.tokenizer import byte_tokenizer
from runner.protocols import Completion, Environments, Observation, Prompt, Request, Rollout

TOKENIZER = byte_tokenizer(512)
END = TOKENIZER.eos_token_id


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER(text, add_special_tokens=False)["input_ids"])


class Script:
    """A sampler that says what it is told to, turn by turn, and remembers what it was asked."""

    temperature = 1.0
    max_new_tokens = 32

    def __init__(self, *turns: str) -> None:
        self.lines, self.asked, self.at = turns, list[list[Request]](), 0

    def load(self, tensors: Any, version: int) -> None:
        raise AssertionError("nothing is loaded here")

    def sample(self, requests: Any) -> list[Rollout]:
        line = self.lines[self.at]
        self.at += 1
        self.asked.append(list(requests))
        ids = (*ids_of(line), END)
        return [Rollout(ids, (-0.5,) * len(ids), (-0.5,) * len(ids), 7, "stop") for _ in requests]


class Keeps:
    """A reward that remembers what it saw."""

    def __init__(self) -> None:
        self.seen: list[Completion] = []

    def score(self, groups: Any) -> list[list[float | None]]:
        self.seen += [one for group in groups for one in group]
        return [[1.0 for _ in group] for group in groups]

    def close(self) -> None:
        pass


PROMPT_TEXT = TOKENIZER.apply_chat_template(
    [{"role": "user", "content": "12+34"}], tokenize=False, add_generation_prompt=True
)
PROMPT = Prompt(ids_of(PROMPT_TEXT), "12+34", ({"role": "user", "content": "12+34"},))


def play(*turns: str, environments: Environments | None = None) -> tuple[Any, Script, Keeps]:
    sampler, reward = Script(*turns), Keeps()
    made = environments or calculator.build(CalculatorConfig())
    collector = Collector(sampler, reward, TOKENIZER, 0, 1, made, Turns(TOKENIZER))
    [group] = collector.groups([PROMPT], 0, 0)
    return group.samples[0], sampler, reward


def test_an_episode_is_the_conversation_that_the_template_writes() -> None:
    sample, _, reward = play("calc 12+34", "46")
    whole = TOKENIZER.apply_chat_template(
        [
            {"role": "user", "content": "12+34"},
            {"role": "assistant", "content": "calc 12+34"},
            {"role": "tool", "content": "46"},
            {"role": "assistant", "content": "46"},
        ],
        tokenize=False,
    )
    assert (*PROMPT.ids, *sample.ids) == ids_of(whole.removesuffix("\n"))
    assert [m["role"] for m in reward.seen[0].messages or ()] == ["user", "assistant", "tool", "assistant"]
    assert reward.seen[0].text == "46"


def test_only_what_the_policy_said_is_learnt() -> None:
    sample, _, reward = play("calc 12+34", "46")
    own = [i for i, mine in zip(sample.ids, sample.mask, strict=True) if mine]
    assert tuple(own) == (*ids_of("calc 12+34"), END, *ids_of("46"), END) == reward.seen[0].ids
    assert all(p == (-0.5 if m else 0.0) for p, m in zip(sample.logprobs, sample.mask, strict=True))


def test_a_turn_begins_exactly_where_the_last_one_ended_and_has_a_seed_of_its_own() -> None:
    sample, sampler, _ = play("calc 1+1", "2")
    first, second = sampler.asked[0][0], sampler.asked[1][0]
    assert first.prompt == PROMPT.ids
    assert second.prompt == (*PROMPT.ids, *sample.ids[: len(second.prompt) - len(PROMPT.ids)])
    assert first.seed != second.seed


def test_turns_are_bounded() -> None:
    _, sampler, _ = play(*["calc 1+1"] * 9, environments=calculator.build(CalculatorConfig(max_turns=3)))
    assert len(sampler.asked) == 3


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        ("calc 2*(3+4)", "14"),
        ("calc 1/2", "1/2"),
        ("calc 1/0", "error: division by zero"),
        ("calc __import__('os')", "error: only whole numbers, + - * / and brackets are known"),
        ("calc 1+", "error: not an expression"),
    ],
)
def test_the_calculator_answers_calls_and_nothing_else(call: str, answer: str) -> None:
    environment = calculator.build(CalculatorConfig()).make()
    environment.reset(PROMPT)
    assert environment.step(call) == Observation("tool", answer)
    assert environment.step("14") is None


def test_a_turn_without_its_end_token_is_closed() -> None:
    turns = Turns(TOKENIZER)
    open_turn, closed = ids_of("4"), (*ids_of("4"), END)
    assert turns.observation("tool", "x", open_turn) == [END, *turns.observation("tool", "x", closed)]


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    tokenizer = byte_tokenizer(512)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] if loop.last or m['role'] != 'assistant' else '' }};{% endfor %}"
    )
    with pytest.raises(EnvironmentProblem, match="writes earlier turns differently"):
        Turns(tokenizer).observation("tool", "x", (1,))
    tokenizer.chat_template = None
    with pytest.raises(EnvironmentProblem, match="needs a chat template"):
        Turns(tokenizer)
