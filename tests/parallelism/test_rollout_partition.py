"""Sampling, rewards, environments and answers shared out: each piece is done once, and everybody has all of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
from torch import Tensor

from runner.core.completion_text import completion_text
from runner.core.errors import DataError, EnvironmentProblem, RunnerError
from runner.distributed.work_partition import SingleProcess
from runner.interfaces import Completion, EnvironmentFactory, Observation, Prompt, Request, Rollout
from runner.model.tiny import byte_tokenizer
from runner.parallelism.environment_partition import PartitionedEnvironments, PartitionedEpisodes
from runner.parallelism.parallel_context import ParallelContext
from runner.parallelism.rollout_partition import (
    PartitionedReward,
    PartitionedSampler,
    Rank0Sampler,
)
from tests.parallelism.worlds import on_ranks


class Echo:
    """A sampler whose answer to a request is its seed; it remembers what it was asked."""

    temperature, max_new_tokens, max_model_len = 0.5, 7, 99

    def __init__(self) -> None:
        self.asked: list[Request] = []

    def load_weights(self, tensors: Mapping[str, Tensor] | None, version: int) -> None:
        self.version = version

    def sample(self, requests: Sequence[Request]) -> list[Rollout]:
        if not requests:
            raise DataError("nothing to sample")
        self.asked += requests
        return [Rollout((r.seed,), (-0.5,), None, self.version, "stop") for r in requests]


TOKENIZER = byte_tokenizer(512)
REQUESTS = [Request((1,) * (1 + seed % 5), seed, 7, group) for seed, group in enumerate([4, 4, 0, 0, 4, 2, 2, 9, 9, 9])]


def sampled(world: ParallelContext, requests: Sequence[Request]) -> tuple[list[int], list[Request]]:
    inner = Echo()
    sampler = PartitionedSampler(inner, world.rollout_peers, nullcontext, TOKENIZER)
    sampler.load_weights(None, 3)
    assert (sampler.temperature, sampler.max_new_tokens, sampler.max_model_len) == (0.5, 7, 99)
    drawn = sampler.sample(requests)
    assert {one.version for one in drawn} == {3}
    texts = [completion_text(TOKENIZER, one.ids) for one in drawn]
    assert [one.text for one in drawn] == texts, "decoded once, by the rank that sampled it"
    return [one.ids[0] for one in drawn], inner.asked


def test_a_groups_requests_stay_together_and_answers_come_in_their_order() -> None:
    ranks = on_ranks(3, sampled, REQUESTS)
    assert [order for order, _ in ranks] == [list(range(10))] * 3
    asked = [{one.group for one in mine} for _, mine in ranks]
    assert set().union(*asked) == {0, 2, 4, 9} and sum(map(len, asked)) == 4
    assert sum(len(mine) for _, mine in ranks) == len(REQUESTS)


def test_a_rank_without_a_request_samples_nothing_and_has_the_answers() -> None:
    ranks = on_ranks(2, sampled, REQUESTS[:2])
    assert [order for order, _ in ranks] == [[0, 1]] * 2
    assert sorted(len(mine) for _, mine in ranks) == [0, 2]


def first(world: ParallelContext) -> tuple[Any, list[Request]]:
    inner = Echo()
    sampler = Rank0Sampler(lambda: inner, world.rollout_peers)
    sampler.load_weights(None, 5)
    facts = (sampler.temperature, sampler.max_new_tokens, sampler.max_model_len)
    drawn = sampler.sample(REQUESTS)
    try:
        sampler.sample([])
    except RunnerError as error:
        return (facts, [(one.ids[0], one.version) for one in drawn], str(error)), inner.asked
    raise AssertionError("nothing was asked for, and nobody minds")


def test_what_only_the_first_rank_speaks_to_answers_all_and_fails_for_all() -> None:
    (one, asked), (other, nothing) = on_ranks(2, first)
    assert one[:2] == other[:2] == ((0.5, 7, 99), [(at, 5) for at in range(10)])
    assert (asked, nothing) == (REQUESTS, []) and "nothing to sample" in one[2] and "nothing to sample" in other[2]


class Length:
    """Scores by length, and says of each answer what it saw; long ones it cannot."""

    def __init__(self) -> None:
        self.seen = 0

    def score(self, groups: Sequence[Sequence[Completion]]) -> list[list[float | None]]:
        return self.score_components(groups)[0]

    def score_components(self, groups: Sequence[Sequence[Completion]]) -> tuple[Any, Any]:
        self.seen += len(groups)
        if any(len(one.ids) > 8 for group in groups for one in group):
            raise DataError("an answer is too long")
        scores = [[None if len(one.ids) == 3 else float(len(one.ids)) for one in group] for group in groups]
        return scores, [[{"length": score} for score in group] for group in scores]

    def close(self) -> None:
        self.seen = -1


def groups(*lengths: Sequence[int]) -> list[list[Completion]]:
    prompt = Prompt((1,), "a")
    return [[Completion(prompt, (2,) * n, "", "stop") for n in group] for group in lengths]


def scored(world: ParallelContext) -> tuple[Any, Any, int, str]:
    inner: Any = Length()
    reward: Any = PartitionedReward(inner, world.rollout_peers, "")
    given = groups((1, 2), (3, 4), (), (5, 5))
    found = reward.score(given), reward.score_components(given)
    try:
        reward.score(groups((1,), (9,)))
        said = "nothing"
    except RunnerError as error:
        said = f"{error.exit_code}: {error}"
    seen = inner.seen
    reward.close()
    assert inner.seen == -1
    return *found, seen, said


def test_each_group_is_scored_once_and_a_failure_is_everybodys() -> None:
    wanted = [[1.0, 2.0], [None, 4.0], [], [5.0, 5.0]]
    ranks = on_ranks(2, scored)
    for scores, (same, parts), _, _ in ranks:
        assert scores == same == wanted
        assert parts == [[{"length": score} for score in group] for group in wanted]
    assert sum(seen for _, _, seen, _ in ranks) == 2 * 4 + 2
    said = {said for *_, said in ranks}
    assert said in ({"3: an answer is too long", f"3: rank {n}: an answer is too long"} for n in (0, 1))


@pytest.mark.parametrize(
    "wrong", [[[1.0], [2.0]], [[1.0, 2.0, 3.0]], [1.0, 2.0], [[1.0, float("nan")]], [["1", 2]], None]
)
def test_a_wrong_number_of_scores_or_no_number_names_the_reward(wrong: Any) -> None:
    class Broken(Length):
        def score_components(self, groups: Sequence[Sequence[Completion]]) -> tuple[Any, Any]:
            return wrong, [[{}, {}]]

    reward: Any = PartitionedReward(Broken(), SingleProcess(), "reward=mine (mine.py:3, build)")
    for score in (reward.score, reward.score_components):
        with pytest.raises(
            EnvironmentProblem,
            match=r"reward=mine \(mine\.py:3, build\): score\(\) returned .*\n  expected a list for each of 1 groups",
        ):
            score(groups((1, 2)))


def test_a_reward_without_parts_has_none_when_it_is_shared() -> None:
    class Plain:
        def score(self, groups: Sequence[Sequence[Completion]]) -> Any:
            return [[1.0 for _ in group] for group in groups]

    assert PartitionedReward(Plain(), SingleProcess(), "").score_components(groups((1, 2))) == (
        [[1.0, 1.0]],
        [[{}, {}]],
    )


class Counter:
    """Says how often it was spoken to, and ends at the third time."""

    def reset(self, prompt: Prompt) -> None:
        MADE.append(prompt.text)
        self.name, self.heard = prompt.text, 0

    def step(self, answer: str) -> Observation | None:
        self.heard += 1
        return None if self.heard == 3 else Observation("tool", f"{self.name} {answer} {self.heard}")


MADE: list[str] = []


def spoken(world: ParallelContext) -> tuple[list[Any], list[str]]:
    MADE.clear()
    environments = PartitionedEnvironments(EnvironmentFactory(Counter, 5), world.peers)
    partners = environments.start_episodes([Prompt((1,), name) for name in "abcde"], range(5))
    turns = [[(at, f"x{at}") for at in range(5)], [(1, "y"), (4, "z")], [(4, "w"), (0, "v")]]
    said = [replies(partners, turn) for turn in turns]
    assert replies(partners, turns[0], is_last=True) == [None] * 5 and len(partners.results()) == 5
    return said, MADE


def replies(partners: PartitionedEpisodes, turns: list[tuple[int, str]], *, is_last: bool = False) -> list[str | None]:
    for number, text in turns:
        partners.submit(number, text, is_last)
    said = dict(partners.replies(0.0))
    return [one.messages[0]["content"] if (one := said[number]).messages else None for number, _ in turns]


def test_an_environment_lives_on_one_rank_and_all_hear_it() -> None:
    ranks = on_ranks(3, spoken)
    wanted = [["a x0 1", "b x1 1", "c x2 1", "d x3 1", "e x4 1"], ["b y 2", "e z 2"], [None, "a v 2"]]
    assert [said for said, _ in ranks] == [wanted] * 3
    assert [made for _, made in ranks] == [["a", "d"], ["b", "e"], ["c"]]
