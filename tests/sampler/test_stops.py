"""When answers end: ids, strings in the text so far, and length."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.model.tiny import byte_tokenizer
from runner.sampler.sampling import StopCriteria

TOKENIZER = byte_tokenizer(512)
END, START = 258, 257


def first_stop(stops: StopCriteria, ids: list[int], limit: int = 10_000) -> tuple[int, str] | None:
    """After how many ids an answer ends, and why."""
    for count in range(1, len(ids) + 1):
        if why := stops.finish_reason(ids[:count], limit):
            return count, why
    return None


@pytest.mark.parametrize(
    ("text", "strings", "count"),
    [
        ("what\n\nelse", ["\n\n"], 6),
        ("one two", ["three", "two"], 7),
        ("snow ☃ man", ["☃"], 8),  # three bytes
        ("a<|im_start|>b", ["<|im_start|>"], 2),  # one special token
        ("not supported", ["zzz"], None),
    ],
)
def test_a_string_ends_an_answer_with_its_last_token(text: str, strings: list[str], count: int | None) -> None:
    found = first_stop(StopCriteria(TOKENIZER, frozenset(), strings), TOKENIZER.encode(text))
    assert found == (None if count is None else (count, "stop"))


@given(st.lists(st.sampled_from([*b"ab\xe2\x98\x83", START]), max_size=40), st.sampled_from(["aba", "b☃", "☃☃a", "a"]))
def test_strings_are_found_as_soon_as_the_text_has_them(ids: list[int], string: str) -> None:
    found = first_stop(StopCriteria(TOKENIZER, frozenset(), [string]), ids)
    counts = [n for n in range(1, len(ids) + 1) if string in TOKENIZER.decode(ids[:n], skip_special_tokens=False)]
    assert found == ((counts[0], "stop") if counts else None)


def test_ids_and_length() -> None:
    stops = StopCriteria(TOKENIZER, frozenset({END, 7}), [])
    assert first_stop(stops, [1, 2, END, 3]) == (3, "stop")
    assert first_stop(stops, [7]) == (1, "stop")
    assert first_stop(stops, [1, 2, 3, 4], limit=3) == (3, "length")
    assert first_stop(stops, [1, 2, END], limit=3) == (3, "stop")


class Counted(list[int]):
    """Ids that count how many of them were read."""

    read = 0

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        self.read += len(found) if isinstance(at, slice) else 1
        return found


@given(st.lists(st.sampled_from([*b"ab\xe2\x98\x83", START]), max_size=40), st.sampled_from(["aba", "b☃", ""]))
def test_where_an_answer_ends_that_another_drew(ids: list[int], string: str) -> None:
    stops = StopCriteria(TOKENIZER, frozenset({ord("b")} if not string else ()), [string] if string else [])
    assert stops.first_stop(ids, 30) == first_stop(stops, ids, 30)


def test_a_long_answer_is_not_read_once_for_each_of_its_tokens() -> None:
    for strings in ([], ["zzz"]):
        ids = Counted([1] * 2000)
        assert StopCriteria(TOKENIZER, frozenset({END}), strings).first_stop(ids, 2000) == (2000, "length")
        assert ids.read < 20 * len(ids)
