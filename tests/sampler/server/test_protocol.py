"""What goes over the wire comes back bit for bit, and what cannot be an answer is refused."""

from __future__ import annotations

import math
import pickle
from array import array
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from runner.interfaces import Request, Rollout
from runner.sampler.server.protocol import (
    AnswerLimits,
    InvalidAnswerError,
    decode,
    decode_requests,
    decode_rollouts,
    decode_scores,
    encode,
    encode_requests,
    encode_rollouts,
    encode_rows,
    encode_scores,
    unpack_rows,
)
from runner.sampler.server.rollout_client import Reply, UnansweredError

LIMITS = AnswerLimits(vocab_size=50, max_new_tokens=6)
REQUESTS = [Request((1, 2), 5, 6, 0), Request((1, 2), 6, 9, 0, raw=True), Request((3,), 7, 2, 1)]
ROLLOUTS = [
    Rollout((4, 5, 6), (-0.5, -1.0, 0.0), None, 1, "stop"),
    Rollout((7,) * 6, (-2.0,) * 6, (-3.0,) * 6, 1, "length"),
    Rollout((49,), (-1.5,), None, 1, "stop"),
]


def transfer(rollouts: list[Rollout], requests: list[Request] = REQUESTS) -> list[Rollout]:
    """Encode them on one side and decode them on the other."""
    return decode_rollouts(*decode(b"\n\n" + encode_rollouts(rollouts, {})), requests, 1, LIMITS)


def test_numbers_are_sent_between_ranks_as_bytes_and_equal_ones_once() -> None:
    size, values = 4096, [-1 / (1 + at) for at in range(4096)]
    both = Rollout(list(range(size)), values, values, 0, "stop")
    sent = pickle.dumps(both)
    assert pickle.loads(sent) == both and len(sent) < 2 * 8 * size + 500
    assert len(pickle.dumps(Rollout(both.ids, values, [2 * one for one in values], 0, "stop"))) > 3 * 8 * size


def test_arrays_of_other_kinds_become_those_of_rollouts() -> None:
    given = Rollout(array("i", [1, 2]), array("f", [-1.0, -2.0]), None, 0, "stop")
    assert given == Rollout((1, 2), (-1.0, -2.0), None, 0, "stop")
    assert Rollout(b"ab", (), None, 0, "stop") == Rollout((97, 98), (), None, 0, "stop")


@pytest.mark.parametrize("wrong", [{"ids": (1.5,)}, {"ids": ("a",)}, {"logprobs": (None,)}])
def test_a_rollout_has_numbers(wrong: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        Rollout(**{"ids": (1,), "logprobs": (-1.0,), "raw_logprobs": None, "version": 0, "finish": "stop"} | wrong)


def test_rollouts_come_back_as_they_were() -> None:
    assert transfer(ROLLOUTS) == ROLLOUTS
    assert transfer([], []) == []


def with_experts(rows: int) -> list[Rollout]:
    """The rollouts, with experts of so many tokens for each beside its prompt and its own but the last."""
    sizes = [len(q.prompt) + len(r.ids) - 1 + rows for q, r in zip(REQUESTS, ROLLOUTS, strict=True)]
    return [
        replace(one, experts=np.arange(size * 6, dtype=np.int16).reshape(size, 2, 3))
        for one, size in zip(ROLLOUTS, sizes, strict=True)
    ]


def test_experts_come_back_as_they_were() -> None:
    for got, wanted in zip(transfer(with_experts(0)), with_experts(0), strict=True):
        assert got.experts is not None and wanted.experts is not None and got.experts.dtype == np.int16
        np.testing.assert_array_equal(got.experts, wanted.experts)
    with pytest.raises(InvalidAnswerError, match=r"int16 \[15, 2, 3\] do not match 12 tokens"):
        transfer(with_experts(1))


INVALID = {
    "one too few": (ROLLOUTS[1:], "3 completions were requested, but 2 arrived"),
    "empty": ({"ids": (), "logprobs": ()}, "answer 0 has 0 tokens"),
    "too long": ({"ids": (1,) * 7, "logprobs": (-1.0,) * 7}, "answer 0 has 7 tokens, not 1 to 6"),
    "outside the vocabulary": ({"ids": (50,), "logprobs": (-1.0,)}, "has the id 50, but the vocabulary"),
    "below it": ({"ids": (-1,), "logprobs": (-1.0,)}, "has the id -1"),
    "logprobs missing": ({"logprobs": ()}, "cannot be read"),
    "not a number": ({"ids": (1,), "logprobs": (math.nan,)}, "has the log-probability nan"),
    "infinite": ({"ids": (1,), "logprobs": (-math.inf,)}, "has the log-probability -inf"),
    "above 0": ({"ids": (1,), "logprobs": (0.5,)}, "has the log-probability 0.5"),
    "of another version": ({"version": 7}, "answer 0 is of version 7, not 1"),
    "without an end": ({"finish": None}, "answer 0 ends with None"),
    "too few raw logprobs": (
        [ROLLOUTS[0], replace(ROLLOUTS[1], raw_logprobs=(-1.0,) * 9), ROLLOUTS[2]],
        "cannot be read",
    ),
    "longer than its request": ([*ROLLOUTS[:2], Rollout((1,) * 3, (-1.0,) * 3, None, 1, "stop")], "answer 2 has 3"),
}


@pytest.mark.parametrize("kind", INVALID)
def test_an_invalid_answer_is_refused(kind: str) -> None:
    change, said = INVALID[kind]
    rollouts = change if isinstance(change, list) else [replace(ROLLOUTS[0], **change), *ROLLOUTS[1:]]
    with pytest.raises(InvalidAnswerError, match=said):
        transfer(rollouts)


@pytest.mark.parametrize(
    "header", [{}, {"rollouts": None}, {"rollouts": [[1, "stop"]]}, {"rollouts": [[1, "stop", True]]}]
)
def test_a_header_that_is_not_of_its_arrays_is_refused(header: dict[str, Any]) -> None:
    arrays = [np.array([1], np.int32), np.array([4], np.int32), np.array([-1.0]), np.array([], np.float64)]
    with pytest.raises(InvalidAnswerError, match="cannot be read"):
        decode_rollouts(header, arrays, REQUESTS[:1], 1, LIMITS)


@pytest.mark.parametrize(
    "found",
    [
        [],
        [[[-1.0, -1.0]]],
        [[[-1.0], [-1.0]]],
        [[[-1.0, -1.0], [math.nan]]],
        [[[-1.0, -1.0], [0.1]]],
    ],
)
def test_invalid_scores_are_refused(found: list[list[list[float]]]) -> None:
    with pytest.raises(InvalidAnswerError):
        decode_scores(*decode(encode_scores(found, {})), [(1, 2, 3), (4, 5)])


def test_scores_are_those_of_every_engine() -> None:
    found = [[[-1.0, -2.5], [0.0]], [[-1.5, 0.0005], [-3.0]]]
    assert decode_scores(*decode(encode_scores(found, {})), [(1, 2, 3), (4, 5)]) == found


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
def test_requests_come_back_as_they_were_and_each_prompt_is_sent_once(requests: list[Request]) -> None:
    header, arrays = decode(encode_requests(requests, {"version": 1}))
    assert decode_requests(header, arrays) == requests
    assert arrays[0].size == len({one.prompt for one in requests})


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=4)))
def test_rows_come_back_as_they_were(rows: list[list[int]]) -> None:
    assert unpack_rows(*decode(encode_rows(rows, {}))[1]) == rows


@given(st.lists(st.floats(max_value=0, allow_nan=False, allow_infinity=False), min_size=1, max_size=6))
def test_every_finite_log_probability_comes_back_bit_for_bit(logprobs: list[float]) -> None:
    [found] = transfer([Rollout((1,) * len(logprobs), tuple(logprobs), None, 1, "stop")], REQUESTS[:1])
    assert [one.hex() for one in found.logprobs] == [one.hex() for one in logprobs]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"hello",
        b"[]\n",
        b"{}\n",
        encode({}, np.array([2, 3], np.int32))[:-1],
        encode({}, np.array([2, 3], np.int32)) + b"a",
        encode([]),  # type: ignore[arg-type]
        save({"0": np.array([2], np.int32)}),
        save({"header": np.frombuffer(b"{}", np.uint8), "1": np.array([2], np.int32)}),
        save({"header": np.frombuffer(b"hello", np.uint8)}),
    ],
)
def test_a_body_that_is_none_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError):
        decode(body)
    with pytest.raises(UnansweredError, match="cannot be read"):
        Reply.parse(body)
    assert decode(encode({"a": 1}, np.array([2], np.int32)))[0] == {"a": 1}
