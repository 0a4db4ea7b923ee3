"""Drawing from a nucleus, and text that comes in whole characters."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runner.model.generation import sample_token, stream_text
from runner.model.tiny import byte_tokenizer

TOKENIZER = byte_tokenizer(512)
decode = partial(TOKENIZER.decode, skip_special_tokens=True)


@given(st.text(st.characters(exclude_categories=["Cs"])).filter(lambda text: "<|" not in text))  # no special token
def test_pieces_are_whole_characters_and_join_to_the_text(text: str) -> None:
    pieces = list(stream_text(TOKENIZER.encode(text), decode))
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert pieces == list(text)


@given(st.lists(st.integers(0, 258), max_size=30))
def test_broken_bytes_are_shown_as_in_the_whole(ids: list[int]) -> None:
    assert "".join(stream_text(ids, decode)) == decode(ids)


def test_text_comes_at_once_and_not_at_the_end() -> None:
    taken: list[int] = []

    def source() -> object:
        for token in TOKENIZER.encode("a☃b"):
            taken.append(token)
            yield token

    pieces = stream_text(source(), decode)  # type: ignore[arg-type]
    assert [(next(pieces), len(taken)) for _ in range(3)] == [("a", 1), ("☃", 4), ("b", 5)]


def test_draws_follow_the_distribution_within_the_nucleus() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    generator = torch.Generator().manual_seed(0)
    drawn = torch.tensor([sample_token(logits, 1.0, 0.7, generator) for _ in range(2000)]).bincount(minlength=4) / 2000
    torch.testing.assert_close(drawn, torch.tensor([0.625, 0.375, 0.0, 0.0]), atol=0.04, rtol=0)


@pytest.mark.parametrize(("temperature", "top_p"), [(0.0, 1.0), (1.0, 1e-9), (1e-3, 1.0)])
def test_cold_or_narrow_is_the_likeliest(temperature: float, top_p: float) -> None:
    logits = torch.tensor([0.0, 2.0, 1.0])
    assert {sample_token(logits, temperature, top_p, torch.Generator()) for _ in range(20)} == {1}
