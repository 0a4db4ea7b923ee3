"""The byte tokenizer: reversible on any text, and a template that knows which tokens the model has to write."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from runner.core.completion_text import completion_text
from runner.model import hf
from runner.model.config import HfConfig
from runner.model.tiny import byte_tokenizer

TOKENIZER = byte_tokenizer(512)
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4 ☃"},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "yes"},
]


@given(st.text(st.characters(exclude_categories=["Cs"])).filter(lambda text: "<|" not in text))  # no special token
def test_any_text_survives(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert len(ids) == len(text.encode()) and all(i < 256 for i in ids)


def test_special_tokens_are_one_id_each() -> None:
    assert TOKENIZER.encode("<|pad|><|im_start|><|im_end|>") == [256, 257, 258]
    assert (TOKENIZER.pad_token_id, TOKENIZER.eos_token_id, len(TOKENIZER)) == (256, 258, 259)
    assert TOKENIZER.decode([257, *TOKENIZER.encode("a"), 258], skip_special_tokens=True) == "a"


def test_the_generation_markers_enclose_what_the_model_writes() -> None:
    made = TOKENIZER.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    learnt = [i for i, own in zip(made["input_ids"], made["assistant_masks"], strict=True) if own]
    assert TOKENIZER.decode(learnt) == "4 ☃<|im_end|>yes<|im_end|>"


def test_the_generation_prompt_is_a_prefix_of_the_whole_chat() -> None:
    whole = TOKENIZER.apply_chat_template(CHAT, tokenize=False)
    asked = TOKENIZER.apply_chat_template(CHAT[:-1], tokenize=False, add_generation_prompt=True)
    assert asked.endswith("<|im_start|>assistant\n") and whole.startswith(asked)


def test_tools_and_tool_calls_are_not_dropped() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    chat = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "tool_calls": [call]}]
    text = TOKENIZER.apply_chat_template(chat, tools=[tool], tokenize=False)
    assert text.startswith("<|im_start|>tools\n[") and '<tool_call>{"name": "add", "arguments"' in text


def test_it_survives_a_folder(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    text = "héllo ☃\n\t<|im_end|>"
    assert again.encode(text) == TOKENIZER.encode(text) and again.decode(again.encode(text)) == text
    assert again.apply_chat_template(CHAT) == TOKENIZER.apply_chat_template(CHAT)
    assert (again.pad_token_id, again.eos_token_id, again.padding_side) == (256, 258, "left")


def test_a_folder_whose_tokenizer_cleans_up_spaces_gives_the_text_as_the_model_wrote_it(tmp_path: Path) -> None:
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((piece, -3.0) for piece in "▁abdfint,.!='")]
    core = Tokenizer(models.Unigram(pieces, unk_id=0))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    given = {"unk_token": "<unk>", "eos_token": "</s>", "clean_up_tokenization_spaces": True}
    PreTrainedTokenizerFast(tokenizer_object=core, **given).save_pretrained(tmp_path)
    text = "if a != b , did n't ."
    for folder in (tmp_path, tmp_path / "export"):
        tokenizer = hf.tokenizer(HfConfig(path="unused", tokenizer=str(folder)))
        assert completion_text(tokenizer, tokenizer(text)["input_ids"]) == text
        tokenizer.save_pretrained(tmp_path / "export")
    assert not AutoTokenizer.from_pretrained(tmp_path / "export").clean_up_tokenization_spaces
