"""Which chat template a job uses, its variables and its day, and which tokens end a turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from runner.core.auto_choices import Decisions
from runner.core.errors import EnvironmentProblem, SpecError
from runner.data.chat import Renderer
from runner.data.chat_template import ChatTemplate, RenderError, install_template, load_template
from runner.data.config import ChatConfig
from runner.data.examples import Message
from tests.data.chat_families import DEEPSEEK, KINDS, contexts, encode_chat, family_tokenizer, spans, trl_template
from tests.data.conftest import CHATML, byte_tokenizer, chat

DATED = CHATML.replace("{% for m", "{{ strftime_now('%d %b %Y') }}{% for m", 1)
THINKS = CHATML.replace("assistant\n{% endif", "assistant\n{{ '<think>' if think is not defined or think }}{% endif")
NEMOTRON = ("nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra", "nemotron_3_5_lightning")


def rendered(tokenizer: Any, messages: list[Message], options: ChatConfig | None = None, tools: Any = ()) -> str:
    return "".join(segment.text for segment in Renderer(tokenizer, options).render_prompt(messages, tools))


@pytest.mark.parametrize("name", ["deepseekv3", "deepseek_r1_distill"])
def test_a_template_that_refuses_plain_answers_is_replaced_by_one_that_generation_sees_alike(name: str) -> None:
    own = trl_template(name)
    original, replaced = (family_tokenizer(own + load_template("deepseek_r1"), *DEEPSEEK) for _ in range(2))
    original.chat_template = replaced.chat_template = own
    decide = Decisions()
    install_template(replaced, ChatConfig(), decide)
    assert replaced.chat_template == load_template("deepseek_r1")
    assert str(decide.entries[0]).startswith("chat.template: deepseek_r1 instead of the model's own")
    install_template(replaced, ChatConfig(), Decisions(strict=True))  # the export of the run carries it
    original.chat_template = own
    with pytest.raises(EnvironmentProblem, match="deepseek_r1"):
        install_template(original, ChatConfig(), Decisions(strict=True))
    # The original leaves out schemas of tools, so that it refuses rows with some; that of distilled models leaves out
    # what ends a single call.
    dropped = "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>" if name == "deepseek_r1_distill" else ""
    for messages, _ in KINDS.values():
        for stop in range(1, len(messages) + 1):
            if messages[stop - 1]["role"] in ("user", "tool"):
                assert rendered(replaced, messages[:stop]).replace(dropped or "\0", "") == rendered(
                    original, messages[:stop]
                )
    assert not isinstance(encode_chat(replaced, KINDS["three turns"][0]), str)


@pytest.mark.parametrize("name", NEMOTRON)
def test_an_answer_without_reasoning_begins_with_an_empty_one_where_generation_opens_it(name: str) -> None:
    tokenizer = family_tokenizer(trl_template(name), "<s>", "<|im_end|>")
    install_template(tokenizer, ChatConfig(), Decisions(strict=True))
    for kind, (messages, tools) in KINDS.items():
        rows = encode_chat(tokenizer, messages, tools)
        assert not isinstance(rows, str), kind
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        found = [ids for row in rows for ids in contexts(row)]
        for turn, ids in zip(turns, found, strict=True):
            assert tokenizer.decode(ids) == rendered(tokenizer, messages[:turn], tools=tools), kind
            assert tokenizer.decode(ids).endswith("<|im_start|>assistant\n<think>\n")
    [row] = encode_chat(tokenizer, KINDS["one turn"][0])
    assert not isinstance(row, str)
    [trained] = spans(tokenizer, row.ids, row.loss_mask)
    assert trained.split() in (["</think>first", "answer<|im_end|>"], ["</think>", "first", "answer<|im_end|>"])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen2_5", {"<|im_end|>"}),
        ("llama3_1", {"<|eot_id|>"}),
        ("gptoss", {"<|return|>", "<|call|>"}),  # <|end|> ends a part of a turn
        ("glm4moe", {"<|user|>", "<|observation|>"}),  # writes no end token
        ("phi3", {"<|end|>"}),  # writes another one after the last turn
        ("cohere2", {"<|END_OF_TURN_TOKEN|>"}),  # the second of two
        ("gemma4_v5", {"<turn|>", "<|tool_response>"}),
        ("nemotron_3_nano", {"<|im_end|>"}),
    ],
)
def test_the_tokens_that_end_a_turn(name: str, expected: set[str]) -> None:
    tokenizer = family_tokenizer(trl_template(name), "<s>", "<eos>")
    template = ChatTemplate(tokenizer, ChatConfig())
    assert template.end_tokens == expected
    assert template.end_token_ids() == {tokenizer.convert_tokens_to_ids(token) for token in expected}


def test_a_turn_that_the_assistant_follows_has_no_end_that_generation_does_not_stop_at() -> None:
    tokenizer = family_tokenizer(trl_template("glm4moe"), "[gMASK]", "<|endoftext|>")
    messages = [*chat("a", "b"), {"role": "assistant", "content": "c"}, *chat("d", "e")]
    rows = encode_chat(tokenizer, messages)
    assert not isinstance(rows, str)
    trained = [text for row in rows for text in spans(tokenizer, row.ids, row.loss_mask)]
    assert [text.rpartition("\n")[2] for text in trained] == ["b", "c<|user|>", "e<|user|>"]


def test_variables_are_defaults_of_the_exported_template(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(THINKS)
    install_template(tokenizer, ChatConfig(kwargs={"think": False}), Decisions())
    tokenizer.save_pretrained(tmp_path)
    read = AutoTokenizer.from_pretrained(tmp_path)
    asked: Any = [{"role": "user", "content": "a"}]
    assert not read.apply_chat_template(asked, tokenize=False, add_generation_prompt=True).endswith("<think>")
    other = read.apply_chat_template(asked, tokenize=False, add_generation_prompt=True, think=True)
    assert other == rendered(read, asked, ChatConfig(kwargs={"think": True})) == rendered(byte_tokenizer(THINKS), asked)


@pytest.mark.parametrize(
    ("template", "name", "words"),
    [
        (THINKS, "thinks", "does not read thinks; it reads: think"),
        (CHATML, "tools", "does not read tools; it reads: none"),
        (None, "think", "there is no chat template"),
    ],
)
def test_variables_that_the_template_does_not_read_are_refused(template: str | None, name: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        install_template(byte_tokenizer(template), ChatConfig(kwargs={name: True}), Decisions())


def test_a_template_has_the_day_of_the_run() -> None:
    tokenizer, options = byte_tokenizer(DATED), ChatConfig(date="2024-02-03")
    renderer = Renderer(tokenizer, options)
    assert rendered(tokenizer, chat("a"), options).startswith("03 Feb 2024<|im_start|>")
    assert any("2024-02-03" in note for note in renderer.notes)
    assert not Renderer(byte_tokenizer(), options).notes
    with pytest.raises(RenderError, match="fails on the conversation"):
        rendered(byte_tokenizer("{{ raise_exception('no') }}"), chat("a"), options)
