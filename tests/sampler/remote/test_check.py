"""Which answers can be those that were asked for, and which cannot; and that what is sent comes back as it was."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.interfaces import Request, Rollout
from runner.sampler.remote.check import InvalidError, Limits, checked, scores
from runner.sampler.remote.wire import answered, asked, requests_of

LIMITS = Limits(vocabulary=50, max_new_tokens=6)
REQUESTS = [Request((1, 2), 5, 6, 0), Request((1, 2), 6, 9, 0, raw=True), Request((3,), 7, 2, 1)]
ROLLOUTS = [
    Rollout((4, 5, 6), (-0.5, -1.0, 0.0), None, 1, "stop"),
    Rollout((7,) * 6, (-2.0,) * 6, (-3.0,) * 6, 1, "length"),
    Rollout((49,), (-1.5,), None, 1, "stop"),
]


def sent(value: Any) -> Any:
    """As it comes out at the other end."""
    return json.loads(json.dumps(value))


def test_answers_come_back_as_they_were() -> None:
    assert checked(sent(answered(ROLLOUTS)), REQUESTS, 1, LIMITS) == ROLLOUTS


def change(**values: Any) -> Any:
    """Edits the first rollout."""

    def edit(rollouts: list[dict[str, Any]]) -> Any:
        return [rollouts[0] | values, *rollouts[1:]]

    return edit


ILL = {
    "no list": (lambda _: None, "3 answers were asked for, and a NoneType came"),
    "one too few": (lambda rollouts: rollouts[1:], "3 answers were asked for, and 2 came"),
    "no record": (lambda rollouts: [3, *rollouts[1:]], "answer 0 is a int"),
    "empty": (change(ids=[], logprobs=[]), "answer 0 is empty"),
    "over-long": (change(ids=[1] * 7, logprobs=[-1.0] * 7), "answer 0 has 7 tokens, above 6"),
    "outside the vocabulary": (change(ids=[50], logprobs=[-1.0]), "has the id 50, and the vocabulary"),
    "below it": (change(ids=[-1], logprobs=[-1.0]), "has the id -1"),
    "no ids": (change(ids=[True], logprobs=[-1.0]), "has the id True"),
    "logprobs missing": (change(logprobs=None), r"has no log-probabilities for \d tokens"),
    "one logprob": (change(ids=[1, 2], logprobs=[-1.0]), "has 1 log-probabilities for 2 tokens"),
    "not a number": (change(ids=[1], logprobs=[math.nan]), "has the log-probability nan"),
    "infinite": (change(ids=[1], logprobs=[-math.inf]), "has the log-probability -inf"),
    "above 0": (change(ids=[1], logprobs=[0.5]), "has the log-probability 0.5"),
    "of another version": (change(version=7), "answer 0 is of version 7, not 1"),
    "without an end": (change(finish=None), "answer 0 ends with None"),
    "raw logprobs missing": (
        lambda rollouts: [rollouts[0], rollouts[1] | {"raw_logprobs": "none"}, *rollouts[2:]],
        "answer 1 has no log-probabilities",
    ),
}


@pytest.mark.parametrize("kind", ILL)
def test_what_cannot_be_an_answer_is_none(kind: str) -> None:
    edit, said = ILL[kind]
    with pytest.raises(InvalidError, match=said):
        checked(edit(sent(answered(ROLLOUTS))), REQUESTS, 1, LIMITS)


def test_the_limit_of_a_request_is_the_shorter_one() -> None:
    long = [ROLLOUTS[0], ROLLOUTS[1], Rollout((1, 2, 3), (-1.0,) * 3, None, 1, "length")]
    with pytest.raises(InvalidError, match="answer 2 has 3 tokens, above 2"):
        checked(sent(answered(long)), REQUESTS, 1, LIMITS)


@pytest.mark.parametrize(
    "found",
    [
        None,
        [],
        [None],
        [[[-1.0, -1.0]]],
        [[[-1.0], [-1.0]]],
        [[[-1.0, -1.0], None]],
        [[[-1.0, -1.0], [math.nan]]],
        [[[-1.0, -1.0], [0.1]]],
    ],
)
def test_what_cannot_be_scores_is_none(found: Any) -> None:
    with pytest.raises(InvalidError):
        scores(found, [(1, 2, 3), (4, 5)])


def test_scores_are_those_of_every_engine() -> None:
    found = [[[-1.0, -2.5], [0.0]], [[-1.5, 0.0005], [-3]]]
    assert scores(found, [(1, 2, 3), (4, 5)]) == found


@given(
    st.lists(
        st.builds(
            Request,
            st.lists(st.integers(0, 2**17), min_size=1, max_size=4).map(tuple),
            st.integers(0, 2**128),
            st.integers(1, 2**20),
            st.integers(0, 5),
            st.booleans(),
        )
    )
)
def test_requests_come_back_as_they_were(requests: list[Request]) -> None:
    body = asked(requests)
    assert requests_of(sent(body)) == requests
    assert len(body["prompts"]) == len({one.prompt for one in requests})


@given(st.lists(st.floats(max_value=0, allow_nan=False, allow_infinity=False), min_size=1, max_size=6))
def test_every_finite_log_probability_comes_back_bit_for_bit(logprobs: list[float]) -> None:
    [found] = checked(
        sent(answered([Rollout((1,) * len(logprobs), tuple(logprobs), None, 3, "stop")])),
        [Request((1,), 1, 6, 0)],
        3,
        LIMITS,
    )
    assert [one.hex() for one in found.logprobs] == [one.hex() for one in logprobs]
