"""Text out of ids, up to a stop string, whatever the pieces are."""

from __future__ import annotations

from itertools import repeat

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from runner.inference.answer_text import TextStream, token_bytes, token_text
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


def sentencepiece() -> PreTrainedTokenizerFast:
    """A tokenizer as Llama 2 and Mistral have it: bytes for rare characters; the first blank of a text is left out."""
    words = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁▁▁", "▁return", "x", "�"]
    core = Tokenizer(models.BPE(dict(zip(words, range(len(words)), strict=True)), [], byte_fallback=True))
    blanks, strip = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    core.decoder = decoders.Sequence([blanks, decoders.ByteFallback(), decoders.Fuse(), strip])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", unk_token="<unk>")


def test_the_bytes_of_tokens_are_those_of_the_text() -> None:
    llama, parts = sentencepiece(), ["▁▁▁", "▁return", "▁", "<0xE4>", "<0xBD>", "<0xA0>", "x", "�"]
    text = "größer 你好 \U0001f600 \x00\ufffd<|im_end|>"
    for tokenizer, ids, whole in (
        (TOKENIZER, TOKENIZER(text)["input_ids"], text),
        (llama, llama.convert_tokens_to_ids(parts), "    return 你x�"),
    ):
        texts = [token_text(lambda ids, t=tokenizer: str(t.decode(ids)), id) for id in ids]  # type: ignore[misc]
        assert b"".join(map(token_bytes, repeat(tokenizer), ids, texts)).decode() == whole


def test_a_completion_keeps_the_blank_that_it_begins_with() -> None:
    llama = sentencepiece()
    prompt, indented = (llama.convert_tokens_to_ids(words) for words in (["x"], ["▁▁▁", "▁return"]))
    for context, text in ((prompt, "    return"), ([], "   return")):
        stream = TextStream(lambda ids: str(llama.decode(ids)), frozenset({1}), context=context)
        assert "".join([*map(stream.push, indented), stream.close()]) == text
