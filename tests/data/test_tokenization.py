"""What is trained on is what generation must produce: checked against generation's own prompts."""

from __future__ import annotations

import hashlib
import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from runner.core.errors import DataError
from runner.data import jinja_sandbox
from runner.data.chat import TrainOn
from runner.data.examples import ChatExample, PromptExample, TextExample
from runner.data.readers import Problems, SourceLocation
from runner.data.tokenization import VERSION, EncodedExample, EncodedRows, ExampleTokenizer, share_prefix
from tests.data.conftest import CHATML, byte_tokenizer, chat

HERE = SourceLocation("a.jsonl", 1)
# Writes thoughts of the last turn only, as reasoning models' templates do.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% if loop.last %}<think></think>{% endif %}{{ m.content }}<|im_end|>"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def encode(tokenizer: Any, example: TextExample | ChatExample, train_on: TrainOn = "assistant") -> EncodedExample:
    problems = Problems("data.path", "a.jsonl")
    rows = ExampleTokenizer(tokenizer, train_on=train_on).encode([example], problems)
    problems.raise_if_any()
    [row] = rows
    assert isinstance(row, EncodedExample)
    return row


def learnt(tokenizer: Any, row: EncodedExample) -> str:
    """The trained tokens as text, stretches divided by |."""
    parts, before = [], 0
    for token, flag in zip(row.ids, row.loss_mask, strict=True):
        if flag and not before:
            parts.append([])
        if flag:
            parts[-1].append(token)
        before = flag
    return " | ".join(tokenizer.decode(part) for part in parts)


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def prompt_ids(tokenizer: Any, messages: list[dict[str, str]], tools: Any = None) -> list[int]:
    """What generation is given."""
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    return ids_of(tokenizer, text)


def test_only_the_answer_and_its_end_token_are_learnt(tokenizer: Any) -> None:
    row = encode(tokenizer, ChatExample(HERE, tuple(chat("2+2?", "4"))))
    assert learnt(tokenizer, row) == "4<|im_end|>"
    assert tokenizer.decode(row.ids) == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
    assert row.ids[: row.answer[0]] == prompt_ids(tokenizer, chat("2+2?"))
    assert tokenizer.decode(row.ids[slice(*row.answer)]) == "4<|im_end|>"


@pytest.mark.parametrize(
    ("train_on", "expected"),
    [("assistant", "4<|im_end|> | 6<|im_end|>"), ("last", "6<|im_end|>")],
)
def test_several_turns(tokenizer: Any, train_on: TrainOn, expected: str) -> None:
    row = encode(tokenizer, ChatExample(HERE, tuple(chat("2+2?", "4", "3+3?", "6", "bye", system="Add."))), train_on)
    assert learnt(tokenizer, row) == expected
    assert row.ids[: row.answer[0]] == prompt_ids(tokenizer, chat("2+2?", "4", "3+3?", system="Add."))
    assert tokenizer.decode(row.ids).endswith("bye<|im_end|>\n") == (train_on == "assistant")


@pytest.mark.parametrize(
    ("key", "no"),
    [("weight", 0), ("loss", False), ("trainable", False), ("loss_mask", 0), ("train", False), ("masked", True)],
)
def test_a_turn_with_a_flag_of_its_own_is_context(tokenizer: Any, key: str, no: Any) -> None:
    messages = chat("2+2?", "5", "3+3?", "6")
    plain = encode(tokenizer, ChatExample(HERE, tuple(messages)))
    messages[1][key] = no
    row = encode(tokenizer, ChatExample(HERE, tuple(messages)))
    assert (learnt(tokenizer, row), row.ids) == ("6<|im_end|>", plain.ids)
    messages[1][key], messages[3][key] = not no, no
    row = encode(tokenizer, ChatExample(HERE, tuple(messages)))
    assert learnt(tokenizer, row) == tokenizer.decode(row.ids[slice(*row.answer)]) == "5<|im_end|>"
    for train_on in ("last", "all"):
        problems = Problems("data.path", "x")
        ExampleTokenizer(tokenizer, train_on=train_on).encode([ChatExample(HERE, tuple(messages))], problems)
        assert f"a message has {key}: " in str(problems.error()) and "chat.train_on=assistant" in str(problems.error())


def test_train_on_all_learns_everything_but_the_first_token(tokenizer: Any) -> None:
    row = encode(tokenizer, ChatExample(HERE, tuple(chat("a", "b", "c"))), "all")
    assert row.loss_mask == [0] + [1] * (len(row.ids) - 1)
    assert row.ids[: row.answer[0]] == prompt_ids(tokenizer, chat("a"))


TEXT = st.lists(st.sampled_from(["a", "b", " ", "\n", "|im_end", "é"]), min_size=1, max_size=8).map("".join)
MERGES = [("a", "b"), ("Ċ", "a"), ("ab", "ab"), ("Ċ", "Ċ"), ("Ġ", "a")]


@given(st.lists(TEXT, min_size=2, max_size=6), st.booleans())
def test_every_prompt_is_what_generation_sees_whatever_is_said(contents: list[str], merges: bool) -> None:
    """Also where the first characters of an answer merge with the last ones before it, in the context of later ones."""
    tokenizer = byte_tokenizer(merges=MERGES if merges else None)
    messages = chat(*contents[: len(contents) // 2 * 2])
    example = ChatExample(HERE, tuple(messages))
    [found] = ExampleTokenizer(tokenizer).encode([example], Problems("data.path", "a.jsonl"))
    rows = found.rows if isinstance(found, EncodedRows) else [found]
    assert merges or len(rows) == 1
    turn = 1
    for row in rows:
        edges = [at for at in range(1, len(row.ids)) if row.loss_mask[at] != row.loss_mask[at - 1]]
        for start, stop in zip(edges[::2], [*edges, len(row.ids)][1::2], strict=True):
            assert row.ids[:start] == prompt_ids(tokenizer, messages[:turn])
            assert row.ids[start:stop] == ids_of(tokenizer, messages[turn]["content"] + "<|im_end|>")
            turn += 2
        assert row.answer == (start, stop)
        context = messages if row is rows[-1] else messages[: turn - 1]
        assert tokenizer.decode(row.ids) == tokenizer.apply_chat_template(context, tokenize=False).removesuffix(
            "" if row is rows[-1] else "\n"
        )
    assert turn == len(messages) + 1


def test_turns_of_a_conversational_prompt_are_context(tokenizer: Any) -> None:
    messages = chat("a", "b", "c", "d")
    row = encode(tokenizer, ChatExample(HERE, tuple(messages), context=3))
    assert learnt(tokenizer, row) == "d<|im_end|>"
    assert row.ids[: row.answer[0]] == prompt_ids(tokenizer, messages[:3])


def test_tools_reach_the_template(tokenizer: Any) -> None:
    tools = ({"type": "function", "function": {"name": "add"}},)
    row = encode(tokenizer, ChatExample(HERE, tuple(chat("a", "b")), tools=tools))
    assert tokenizer.decode(row.ids).startswith('<|im_start|>system\n[{"type": "function"')
    assert row.ids[: row.answer[0]] == prompt_ids(tokenizer, chat("a"), list(tools))


def test_no_chat_template_says_what_to_do() -> None:
    with pytest.raises(DataError, match=r"no chat template(?s:.)*model\.tokenizer"):
        encode(byte_tokenizer(template=None), ChatExample(HERE, tuple(chat("a", "b"))))


def test_a_template_that_refuses_names_the_row() -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match=r"a\.jsonl:1: the chat template fails on.*roles must alternate"):
        encode(byte_tokenizer(template=template), ChatExample(HERE, tuple(chat("a", "b"))))


def test_a_template_that_rewrites_history_gives_each_turn_its_own_row() -> None:
    """Each row is what generation sees before the turn, and the turn; what the rows begin with stands once."""
    tokenizer = byte_tokenizer(template=FORGETFUL)
    talk = ChatExample(HERE, tuple(chat("a", "b", "c", "d")))
    [encoded] = ExampleTokenizer(tokenizer).encode([talk], Problems("data.path", "a"))
    assert isinstance(encoded, EncodedRows)
    for row, turn, said in zip(encoded.rows, (1, 3), ("b", "d"), strict=True):
        assert learnt(tokenizer, row) == f"<think></think>{said}<|im_end|>"
        assert row.ids[: row.answer[0]] == prompt_ids(tokenizer, list(talk.messages[:turn]))
    joined = share_prefix(encoded.rows)
    assert joined is not None
    shared, second = joined.branches
    assert joined.ids[:second] == encoded.rows[0].ids
    assert joined.ids[:shared] + joined.ids[second:] == encoded.rows[1].ids
    assert sum(joined.loss_mask) == sum(sum(row.loss_mask) for row in encoded.rows)
    assert joined.ids[slice(*joined.answer)] == encoded.rows[1].ids[slice(*encoded.rows[1].answer)]
    row = encode(tokenizer, talk, "last")
    assert row == encoded.rows[1]


def test_an_end_that_is_no_special_token_is_noted() -> None:
    tokenizer = byte_tokenizer(template=CHATML.replace("<|im_end|>", "##"))
    example_tokenizer = ExampleTokenizer(tokenizer)
    [row] = example_tokenizer.encode([ChatExample(HERE, tuple(chat("a", "b")))], Problems("data.path", "a"))
    assert learnt(tokenizer, row) == "b##\n"
    assert example_tokenizer.notes == {
        "the chat template ends an assistant turn without a special token, so its end is not trained"
    }


@pytest.mark.parametrize("bos", [False, True])
def test_plain_completions_and_texts_end_in_a_learnt_end_token(bos: bool) -> None:
    tokenizer = byte_tokenizer(bos=bos)
    start = "<|bos|>" if bos else ""
    row = encode(tokenizer, TextExample(HERE, "ab", "cd"))
    assert (tokenizer.decode(row.ids), learnt(tokenizer, row)) == (f"{start}abcd<|im_end|>", "cd<|im_end|>")
    assert row.ids[: row.answer[0]] == tokenizer("ab")["input_ids"]
    assert tokenizer.pad_token_id == tokenizer.eos_token_id  # learnt all the same
    text = encode(tokenizer, TextExample(HERE, None, "abc"))
    assert tokenizer.decode(text.ids) == f"{start}abc<|im_end|>"
    assert (text.loss_mask, text.answer) == ([0] + [1] * (3 + bos), (0, 0))
    assert encode(tokenizer, TextExample(HERE, "ab", "cd"), "all").loss_mask == [0] + [1] * (4 + bos)


def test_no_special_token_is_doubled() -> None:
    tokenizer = byte_tokenizer(template="<|bos|>" + CHATML, bos=True)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    assert encode(tokenizer, ChatExample(HERE, tuple(chat("a", "b")))).ids.count(bos) == 1
    written = encode(tokenizer, TextExample(HERE, None, "<|bos|>ab<|im_end|>")).ids
    assert (written.count(bos), written.count(eos)) == (1, 1)


def test_last_of_plain_text_is_refused(tokenizer: Any) -> None:
    with pytest.raises(DataError, match=r"chat\.train_on=last: a\.jsonl:1 is plain text"):
        encode(tokenizer, TextExample(HERE, None, "ab"), "last")


def test_a_tokenizer_without_end_token_is_noted() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    example_tokenizer = ExampleTokenizer(tokenizer)
    [row] = example_tokenizer.encode([TextExample(HERE, None, "ab")], Problems("data.path", "a"))
    assert len(row.ids) == 2
    assert "no end-of-sequence token" in "".join(example_tokenizer.notes)


def metaspace_tokenizer() -> Any:
    """Puts a space before every text, as SentencePiece models of the Llama 2 kind do."""
    vocab = {c: i for i, c in enumerate(["<unk>", "</s>", "▁", "\n", *"abcd", "▁a", "▁c"])}
    backend = Tokenizer(models.BPE(vocab, [("▁", "a"), ("▁", "c")], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")


def test_no_space_appears_between_prompt_and_completion() -> None:
    tokenizer = metaspace_tokenizer()
    assert tokenizer.decode(ids_of(tokenizer, "ab") + ids_of(tokenizer, "cd")) == "ab cd"  # the trap
    row = encode(tokenizer, TextExample(HERE, "ab", "cd"))
    assert tokenizer.decode(row.ids) == "abcd</s>"
    assert row.ids[: row.answer[0]] == ids_of(tokenizer, "ab")


def test_a_batch_is_its_rows_one_by_one(tokenizer: Any) -> None:
    examples: list[TextExample | ChatExample] = [
        ChatExample(HERE, tuple(chat(f"q{i}", "a" * (i % 3 + 1)))) for i in range(20)
    ]
    assert ExampleTokenizer(tokenizer).encode(examples, Problems("k", "a")) == [encode(tokenizer, e) for e in examples]


def test_golden_tokens(tokenizer: Any) -> None:
    """If this fails on purpose, raise VERSION in runner/data/tokenization.py, so that no old cache is used."""
    examples: list[TextExample | ChatExample] = [
        ChatExample(HERE, tuple(chat("a", "b", "c", "d", system="s"))),
        ChatExample(HERE, tuple(chat("a", "b", "c", "d")), context=3),
        TextExample(HERE, "ab", "cd"),
        TextExample(HERE, None, "abé"),
    ]
    rows = [
        (row.ids, row.loss_mask, row.answer)
        for train_on in ("assistant", "all")
        for row in ExampleTokenizer(tokenizer, train_on=train_on).encode(examples, Problems("k", "a"))
    ]
    found = hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]
    assert (VERSION, found) == (5, "44a2e48f5a269405")


def test_a_template_that_does_not_end_is_an_error_of_the_first_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deadline for each of a million rows would be weeks."""
    monkeypatch.setattr(jinja_sandbox.render, "__defaults__", (0.05,))
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    tokenizer, problems = ExampleTokenizer(byte_tokenizer(template=endless)), Problems("data.path", "a.jsonl")
    talk = chat("a", "b")
    begin = time.monotonic()
    with pytest.raises(DataError, match=r"a\.jsonl:1: the chat template ran for more than .*chat\.template=FILE"):
        tokenizer.encode([ChatExample(HERE, tuple(talk))] * 1000, problems)
    with pytest.raises(DataError, match=r"a\.jsonl:1: the chat template ran for more than"):
        tokenizer.encode([PromptExample(HERE, tuple(talk[:1]))] * 1000, problems)
    assert time.monotonic() - begin < 25  # half of the deadlines of all rows
