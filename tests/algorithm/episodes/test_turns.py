"""Episodes of several turns: what is trained on, what is context, and that no token is made twice."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from runner.algorithm import experience_state, rollouts
from runner.algorithm.episode import FAILED, Episode
from runner.algorithm.policy.config import GrpoConfig
from runner.algorithm.rollouts import Experience, Group, RolloutCollector
from runner.build.environments import build_extend
from runner.core.auto_choices import Decisions
from runner.core.completion_text import completion_text
from runner.core.errors import EnvironmentProblem
from runner.core.prefix_tree import Branch, Tree, pack_trees
from runner.data.chat import Renderer
from runner.data.config import ChatConfig
from runner.environment import calculator
from runner.environment.config import CalculatorConfig
from runner.interfaces import (
    Completion,
    EnvironmentFactory,
    EvalQuestion,
    Observation,
    Prompt,
    Request,
    Rollout,
    TokenizedExample,
)
from runner.model.tiny import byte_tokenizer
from runner.reward.config import FormatConfig
from runner.trainer.answer_evaluator import AnswerEvaluator
from runner.trainer.evaluator import Report
from tests.algorithm import harness
from tests.reward.samples import scores

TOKENIZER = byte_tokenizer(512)
END = TOKENIZER.eos_token_id


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER(text, add_special_tokens=False)["input_ids"])


class Script:
    """A sampler that says what it is told to, turn by turn, and remembers what it was asked."""

    temperature = 1.0
    max_new_tokens = 32
    max_model_len: int | None = None

    def __init__(self, *turns: str) -> None:
        self.lines, self.asked, self.at = turns, list[list[Request]](), 0

    def load_weights(self, tensors: Any, version: int) -> None:
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


def play(
    *turns: str, environments: EnvironmentFactory | None = None, longest: int | None = None
) -> tuple[Any, Script, Keeps]:
    sampler, reward = Script(*turns), Keeps()
    sampler.max_model_len = longest
    made = environments or calculator.build(CalculatorConfig())
    collector = RolloutCollector(sampler, reward, TOKENIZER, 0, 1, made, Renderer(TOKENIZER).extend)
    [group] = collector.collect_groups([PROMPT], 0, 0)
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


def test_rewards_and_environments_read_special_tokens_that_the_model_wrote_but_not_the_end() -> None:
    heard: list[str] = []

    class Listener:
        def reset(self, prompt: Prompt) -> None: ...

        def step(self, answer: str) -> Observation | None:
            heard.append(answer)
            return None

    sample, _, reward = play("<|im_start|>a<|pad|>", environments=EnvironmentFactory(Listener, max_turns=2))
    assert heard == [reward.seen[0].text] == [sample.text] == ["<|im_start|>a<|pad|>"]
    pattern = FormatConfig(pattern=r"<\|im_start\|>.*")
    assert scores(pattern, reward.seen[0]) == [1]


def test_one_special_token_at_the_end_is_no_part_of_the_text() -> None:
    assert completion_text(TOKENIZER, ids_of("ab")) == "ab" and completion_text(TOKENIZER, ()) == ""
    assert completion_text(TOKENIZER, ids_of("ab<|im_end|><|im_end|>")) == "ab<|im_end|>"


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


@pytest.mark.parametrize("room", range(20, 120, 7))
def test_an_episode_ends_where_the_model_has_no_room_for_another_turn(room: int) -> None:
    """With what fits, and never with half of what the environment said."""
    turns = ["calc 1+1"] * 8
    whole, _, _ = play(*turns, environments=calculator.build(CalculatorConfig(max_turns=8)))
    longest = len(PROMPT.ids) + room
    eight = calculator.build(CalculatorConfig(max_turns=8))
    sample, sampler, reward = play(*turns, environments=eight, longest=longest)
    requests = [request for asked in sampler.asked for request in asked]
    assert sample.ids == whole.ids[: len(sample.ids)] and sample.mask[-1] == 1
    assert sample.finish == reward.seen[0].finish == ("stop" if len(requests) == 8 else "length")
    for request in requests[1:]:
        assert 0 < request.max_new_tokens == min(32, longest - len(request.prompt))


def test_an_episode_that_outgrows_a_real_model_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "CONFIG", harness.CONFIG.model_copy(update={"max_positions": 64}))
    environments, often = EnvironmentFactory(harness.Nods, 8), range(0, 512, 2)
    job = harness.job_of(GrpoConfig(batch_size=4, group_size=2), environments=environments, stop_token_ids=often)
    job.publish(0)
    experience: Any = job.algorithm.collect(0)
    samples = [(len(group.prompt.ids) + len(one.ids), one) for group in experience.groups for one in group.samples]
    assert all(one.finish == "length" and size <= 64 for size, one in samples), "eight turns do not fit"
    assert any(one.history for _, one in samples), "or no episode went on"
    assert job.algorithm.describe(0, experience)[0]["rollout/truncated_frac"] == 1
    list(job.algorithm.prepare(experience, job.models))


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        ("calc 2*(3+4)", "14"),
        ("calc 1/2", "1/2"),
        ("calc 1/0", "error: division by zero"),
        ("calc __import__('os')", "error: only integers, + - * / and brackets are supported"),
        ("calc 1+", "error: not an expression"),
    ],
)
def test_the_calculator_answers_calls_and_nothing_else(call: str, answer: str) -> None:
    environment = calculator.build(CalculatorConfig()).make()
    environment.reset(PROMPT)
    assert environment.step(call) == Observation("tool", answer)
    assert environment.step("14") is None


def test_what_was_said_before_the_last_turn_is_kept_and_survives_a_checkpoint() -> None:
    sample, _, _ = play("calc 12+34", "46")
    assert sample.history == ({"role": "assistant", "content": "calc 12+34"}, {"role": "tool", "content": "46"})
    experience = Experience(0, (Group(PROMPT, (sample,)),), 1)
    again = experience_state.decode_experience(
        json.loads(json.dumps(experience_state.encode_experience(experience), default=list_of), object_hook=tensor_of)
    )
    assert again == experience
    [row] = rollouts.sample_records(experience, rewarded=True, tokenizer=None)
    assert (row["turns"], row["answer"]) == (list(sample.history), "46")
    [alone] = rollouts.sample_records(
        Experience(0, (Group(PROMPT, (play("46")[0],)),), 1), rewarded=True, tokenizer=None
    )
    assert "turns" not in alone and alone["answer"] == "46"


def test_tokens_keep_the_experts_that_they_were_drawn_with_over_turns_and_checkpoints() -> None:
    episode, computed = Episode(PROMPT), list[Any]()
    for turn, length in enumerate((2, 3)):
        tokens = len(PROMPT.ids) + len(episode.ids) + length - 1
        computed.append(np.full((tokens, 1, 2), turn, np.int16))
        episode.append_action(Rollout((5,) * length, (-1.0,) * length, None, 0, "stop", experts=computed[-1]), "")
        episode.append_observation([{"role": "tool", "content": ""}], [6])
    assert episode.experts is not None
    before = len(PROMPT.ids) + 2 - 1  # the last token of a turn is computed in the next one
    assert episode.experts[:, 0, 0].tolist() == [0] * before + [1] * (1 + 1 + 3 - 1)
    del episode.ids[-1], episode.mask[-1], episode.logprobs[-1]  # no observation ends an episode
    samples = rollouts.make_group([episode] * 2, [1.0, 0.0], [{}, {}]).samples
    experience = Experience(0, (Group(PROMPT, samples),), 1)
    [group] = experience_state.decode_experience(experience_state.encode_experience(experience)).groups
    for one in group.samples:
        assert one.experts is not None and one.experts.dtype == np.int16
        np.testing.assert_array_equal(one.experts, episode.experts)
    for share in (True, False):
        trees = [Tree(PROMPT.ids, [Branch(one.ids) for one in samples])]
        channel = rollouts.expert_channel(pack_trees(trees, share=share), [group])[:, 0, 0].tolist()
        row = [*episode.experts[:, 0, 0].tolist(), -1]
        prompt = len(PROMPT.ids)
        assert channel == ([*row, *row[prompt:]] if share else row * 2)
    lost, unknown = Episode(PROMPT, finish=FAILED), Episode(PROMPT)
    unknown.append_action(Rollout((5,), (-1.0,), None, 0, "stop"), "")
    mixed = rollouts.make_group([lost, unknown, episode], [None, None, 1.0], [{}] * 3)
    trees = [Tree(PROMPT.ids, [Branch(one.ids) for one in mixed.played_samples])]
    channel = rollouts.expert_channel(pack_trees(trees, share=False), [mixed])
    assert channel is not None and channel[:, 0, 0].tolist() == [*([-1] * (prompt + 1)), *row], "the rest is replayed"
    assert rollouts.expert_channel(pack_trees(trees[:1]), [Group(PROMPT, (mixed.samples[1],) * 2)]) is None


def list_of(tensor: torch.Tensor) -> dict[str, Any]:
    return {"is": str(tensor.dtype).removeprefix("torch."), "values": tensor.tolist()}


def tensor_of(value: dict[str, Any]) -> Any:
    return torch.tensor(value["values"], dtype=getattr(torch, value["is"])) if "is" in value else value


def job_spec() -> Any:
    return SimpleNamespace(chat=ChatConfig())


def test_an_evaluation_with_an_environment_compares_the_last_turn() -> None:
    questions = [
        EvalQuestion(TokenizedExample(PROMPT.ids, (0.0,) * len(PROMPT.ids)), PROMPT.ids, "", right)
        for right in ("46", "47")
    ]

    def evaluate(environments: EnvironmentFactory | None) -> Report:
        turns = Script("calc 12+34", "46")
        collector = RolloutCollector(turns, None, TOKENIZER, 0, 1, environments, Renderer(TOKENIZER).extend)
        return AnswerEvaluator(
            questions, questions, collector, dict, "eval", "evaluation", 1.0, is_greedy=True
        ).evaluate()

    report = evaluate(calculator.build(CalculatorConfig()))
    assert report.values["eval/exact_match"] == 0.5 and "eval/loss" not in report.values
    assert [s["turns"][1]["content"] for s in report.samples] == ["46", "46"]
    assert evaluate(None).values["eval/exact_match"] == 0


def test_a_turn_without_its_end_token_is_closed() -> None:
    extend = Renderer(TOKENIZER).extend
    message = {"role": "tool", "content": "x"}
    assert extend(ids_of("4"), [message]) == [END, *extend((*ids_of("4"), END), [message])]


def test_a_template_that_rewrites_earlier_turns_is_continued() -> None:
    tokenizer = byte_tokenizer(512)
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{% if loop.last and m.role == 'assistant' %}<think></think>{% endif %}"
        "{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    found = Renderer(tokenizer).extend((*ids_of("<think></think>calc 1"), END), [{"role": "tool", "content": "x"}])
    assert tokenizer.decode(found) == "<|im_start|>x<|im_end|><|im_start|>"


def test_a_template_that_writes_nothing_of_an_observation_is_refused() -> None:
    tokenizer = byte_tokenizer(512)
    tokenizer.chat_template = "{% for m in messages if m.role != 'tool' %}{{ m.content }}<|im_end|>{% endfor %}"
    with pytest.raises(EnvironmentProblem, match="does not render the environment's messages of role tool: 'x'"):
        Renderer(tokenizer).extend((1,), [{"role": "tool", "content": "x"}])
    with pytest.raises(EnvironmentProblem, match=r"does not render(?s:.)*environment\.role=user"):
        build_extend(job_spec(), tokenizer, calculator.build(CalculatorConfig()), Decisions())
    assert build_extend(job_spec(), tokenizer, calculator.build(CalculatorConfig(role="user")), Decisions())
    tokenizer.chat_template = None
    with pytest.raises(EnvironmentProblem, match="needs a chat template"):
        build_extend(job_spec(), tokenizer, calculator.build(CalculatorConfig()), Decisions())
