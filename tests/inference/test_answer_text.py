"""Text out of ids, up to a stop string, whatever the pieces are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from runner.inference.answer_text import TextStream
from runner.model.tiny import byte_tokenizer

TOKENIZER = byte_tokenizer(512)


@given(st.text(max_size=30), st.lists(st.text(min_size=1, max_size=4), max_size=3))
def test_streamed_text_is_the_text_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    text = TOKENIZER.decode(TOKENIZER(text)["input_ids"])
    found = min((text.find(stop) for stop in stops if stop in text), default=len(text))
    stream = TextStream(lambda ids: str(TOKENIZER.decode(ids)), frozenset({258}), stops)
    pieces = []
    for id in [*TOKENIZER(text)["input_ids"], 258]:
        pieces.append(stream.push(id))
        if stream.stop_reason is not None:
            break
    assert "".join([*pieces, stream.close()]) == text[:found]
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)
