"""A prompt and its answers have the very tokens that sft has for them, and the prompt those that generation sees."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.data.chat import TrainOn
from runner.data.examples import AnswersExample, ChatExample, PromptExample, TextExample
from runner.data.readers import Problems, SourceLocation
from runner.data.tokenization import EncodedAnswers, EncodedExample, ExampleTokenizer
from tests.data.conftest import CHATML, byte_tokenizer, chat

HERE = SourceLocation("a.jsonl", 1)
TEXT = st.lists(st.sampled_from(["a", "b", " ", "\n", "|im_end", "<", "é"]), min_size=1, max_size=8).map("".join)
MERGES = [("a", "b"), ("Ċ", "a"), ("ab", "ab"), ("Ċ", "Ċ"), ("Ġ", "a")]
TOOLS = ({"type": "function", "function": {"name": "add"}},)
# The generation prompt opens a thought that the answer's own text does not have.
THINKING = CHATML.replace("<|im_start|>assistant\n{%", "<|im_start|>assistant\n<think>\n{%")


def tree(tokenizer: Any, example: PromptExample | AnswersExample) -> EncodedAnswers:
    problems = Problems("data.path", "a.jsonl")
    rows = ExampleTokenizer(tokenizer, train_on="completion").encode([example], problems)
    problems.raise_if_any()
    [row] = rows
    assert isinstance(row, EncodedAnswers)
    return row


def sft(tokenizer: Any, example: TextExample | ChatExample, train_on: TrainOn) -> EncodedExample:
    [row] = ExampleTokenizer(tokenizer, train_on=train_on).encode([example], Problems("data.path", "a.jsonl"))
    return row


def learnt_part(row: EncodedExample) -> tuple[list[int], list[int]]:
    """(what stands before the trained tokens, the learnt ones) of a row with one stretch of them."""
    start, stop = row.loss_mask.index(1), len(row.loss_mask) - row.loss_mask[::-1].index(1)
    assert all(row.loss_mask[start:stop])
    return row.ids[:start], row.ids[start:stop]


def seen_by_generation(tokenizer: Any, messages: list[dict[str, str]], tools: Any = None) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@given(st.lists(TEXT, min_size=1, max_size=3), TEXT, TEXT, st.booleans(), st.sampled_from(["assistant", "all"]))
def test_chats_concatenate_to_the_tokens_of_sft(
    turns: list[str], chosen: str, rejected: str, merges: bool, train_on: TrainOn
) -> None:
    tokenizer = byte_tokenizer(merges=MERGES if merges else None)
    prompt = chat(*turns[: len(turns) // 2 * 2 - 1] if len(turns) > 1 else turns)
    answers = tuple(
        ChatExample(HERE, (*prompt, {"role": "assistant", "content": said}), len(prompt), TOOLS)
        for said in (chosen, rejected)
    )
    row = tree(tokenizer, AnswersExample(HERE, answers))
    assert row.prompt == seen_by_generation(tokenizer, prompt, list(TOOLS))
    assert row.prompt == tree(tokenizer, PromptExample(HERE, tuple(prompt), TOOLS)).prompt
    for completion, example in zip(row.answers, answers, strict=True):
        whole = sft(tokenizer, example, train_on)
        assert whole.ids[: len(row.prompt) + len(completion)] == row.prompt + completion
        assert (row.prompt, completion) == learnt_part(sft(tokenizer, example, "last"))
        assert completion[-1] == tokenizer.eos_token_id


@given(TEXT, TEXT, TEXT, st.booleans(), st.booleans())
def test_texts_concatenate_to_the_tokens_of_sft(
    prompt: str, chosen: str, rejected: str, merges: bool, bos: bool
) -> None:
    tokenizer = byte_tokenizer(merges=MERGES if merges else None, bos=bos)
    answers = (TextExample(HERE, prompt, chosen), TextExample(HERE, prompt, rejected))
    row = tree(tokenizer, AnswersExample(HERE, answers))
    assert row.prompt == tokenizer(prompt)["input_ids"] == tree(tokenizer, PromptExample(HERE, prompt)).prompt
    for completion, example in zip(row.answers, answers, strict=True):
        whole = sft(tokenizer, example, "assistant")
        assert whole.ids == row.prompt + completion
        assert whole.loss_mask[1:] == ([0] * len(row.prompt) + [1] * len(completion))[1:]
        assert completion[-1] == tokenizer.eos_token_id


def test_the_blanks_after_the_end_token_belong_to_no_answer(tokenizer: Any) -> None:
    row = tree(tokenizer, AnswersExample(HERE, (ChatExample(HERE, tuple(chat("a", "b")), 1),)))
    assert tokenizer.decode(row.prompt) == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(row.answers[0]) == "b<|im_end|>"


def test_an_answer_of_several_turns_is_all_that_follows_the_prompt(tokenizer: Any) -> None:
    talk = ChatExample(HERE, tuple(chat("a", "b", "c", "d")), 1)
    row = tree(tokenizer, AnswersExample(HERE, (talk,)))
    assert row.prompt == seen_by_generation(tokenizer, chat("a"))
    text = "b<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\nd<|im_end|>"
    assert tokenizer.decode(row.answers[0]) == text
    whole = tokenizer.apply_chat_template(chat("a", "b", "c", "d"), tokenize=True, return_dict=False)
    assert [*row.answers[0], *tokenizer("\n").input_ids] == whole[len(row.prompt) :]  # TRL's DPOTrainer, KTOTrainer


def test_a_batch_is_its_rows_one_by_one(tokenizer: Any) -> None:
    asks = [PromptExample(HERE, tuple(chat(f"q{i}")), columns={"n": i}) for i in range(9)]
    pairs = [
        AnswersExample(HERE, (TextExample(HERE, f"p{i}", "a" * i + "b"), TextExample(HERE, f"p{i}", "c")), {})
        for i in range(9)
    ]
    for rows in (asks, pairs):
        together = ExampleTokenizer(tokenizer, train_on="completion").encode(rows, Problems("k", "a"))  # type: ignore[arg-type]
        assert together == [tree(tokenizer, row) for row in rows]


def test_what_is_known_of_a_row_is_kept_as_json(tokenizer: Any) -> None:
    record = tree(tokenizer, PromptExample(HERE, tuple(chat("a")), columns={"answer": "é", "n": [1, None]})).record()
    assert json.loads(record["facts"]) == {"messages": chat("a"), "columns": {"answer": "é", "n": [1, None]}}
    assert record["answers"] == []


def test_a_template_that_opens_answers_it_does_not_write_is_refused_and_can_be_asked() -> None:
    tokenizer = byte_tokenizer(template=THINKING)
    problems = Problems("data.path", "a.jsonl")
    both = tuple(ChatExample(SourceLocation("a.jsonl", 3), tuple(chat("a", said)), 1) for said in "bc")
    sound = AnswersExample(HERE, (TextExample(HERE, "a", "b"), TextExample(HERE, "a", "c")))
    rows = ExampleTokenizer(tokenizer, train_on="completion").encode(
        [AnswersExample(SourceLocation("a.jsonl", 3), both), sound], problems
    )
    assert [row.place for row in rows] == [HERE]
    assert problems.count == 1  # one row, although neither answer can be told from its prompt
    assert "a.jsonl:3: the chat template's generation prompt differs" in str(problems.error())
    assert "plain text prompt" in str(problems.error())
    assert tokenizer.decode(tree(tokenizer, PromptExample(HERE, tuple(chat("a")))).prompt).endswith(
        "assistant\n<think>\n"
    )


@pytest.mark.parametrize("bos", [False, True])
def test_a_beginning_that_is_written_in_a_prompt_is_not_doubled(bos: bool) -> None:
    tokenizer = byte_tokenizer(bos=bos)
    written = tree(tokenizer, PromptExample(HERE, "<|bos|>ab")).prompt
    assert written.count(tokenizer.bos_token_id) == 1
    assert tree(tokenizer, PromptExample(HERE, "ab")).prompt.count(tokenizer.bos_token_id) == bos
