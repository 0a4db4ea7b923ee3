"""Rows in the formats of other projects become this project's columns, and no column disappears unsaid."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner.core.auto_choices import Decisions
from runner.data.examples import AnswersExample, ChatExample, PromptExample, Reading
from runner.data.formats import FormatCheck
from runner.data.readers import Problems, Row, SourceLocation
from tests.data.conftest import byte_tokenizer, chat
from tests.data.test_file import data, said, texts

SHAREGPT: dict[str, Any] = {
    "conversations": [
        {"from": "system", "value": "be brief"},
        {"from": "human", "value": "2+2?"},
        {"from": "gpt", "value": "4"},
    ],
    "id": 7,
}
ALPACA = {"instruction": "add", "input": "2 2", "output": "4", "history": [["hi", "hello"]], "system": "be brief"}
BRIEF = chat("2+2?", "4", system="be brief")
ADDED = chat("hi", "hello", "add\n2 2", "4", system="be brief")


def check(reading: Reading, *rows: dict[str, Any]) -> tuple[list[Any], FormatCheck, str]:
    """Examples, the check, and the error's text or nothing."""
    problems = Problems("data.path", "a.jsonl")
    found = FormatCheck(problems, reading)
    examples = list(found.examples(Row(SourceLocation("a.jsonl", i), row) for i, row in enumerate(rows, 1)))
    return examples, found, str(problems.error()) if problems.count else ""


@pytest.mark.parametrize(
    ("row", "name", "messages"),
    [
        (SHAREGPT, "ShareGPT", BRIEF),
        ({"messages": SHAREGPT["conversations"]}, "ShareGPT", BRIEF),
        ({"conversations": SHAREGPT["conversations"][1:], "system": "be brief"}, "ShareGPT", BRIEF),
        ({"conversations": BRIEF}, "ShareGPT", BRIEF),  # with the keys role and content already
        (ALPACA, "Alpaca", ADDED),
        ({"instruction": "add", "input": "", "output": "4", "text": "### add"}, "Alpaca", chat("add", "4")),
        ({"query": "2+2?", "response": "4", "system": "be brief", "history": []}, "query/response", BRIEF),
        ({"system": "be brief", "conversation": [{"human": "2+2?", "assistant": "4"}]}, "conversation", BRIEF),
    ],
)
def test_a_format_of_another_project_becomes_messages(row: Any, name: str, messages: list[Any]) -> None:
    [example], found, message = check("sft", row)
    assert isinstance(example, ChatExample)
    assert (list(example.messages), str(found.format), message) == (messages, f"{name} → messages", "")
    assert {*found.converted, *found.ignored} >= row.keys()  # no column without a word


def test_columns_and_keys_that_are_not_read_are_known() -> None:
    turns = [{**turn, "markdown": False} for turn in SHAREGPT["conversations"]]
    found = check("sft", SHAREGPT, {**SHAREGPT, "conversations": turns, "source": "x"})[1]
    assert (found.converted, found.ignored) == ({"conversations"}, {"id", "source"})
    assert found.unread == {"messages[].markdown"}
    assert check("sft", {**ALPACA, "text": "x"})[1].ignored == {"text"}


def test_function_calls_and_observations_become_tool_calls_and_tool_turns() -> None:
    turns = [
        {"from": "human", "value": "2+2?"},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2, "b": 2}}'},
        {"from": "observation", "value": "4"},
        {"from": "gpt", "value": "four", "loss": False},
    ]
    tools = [{"type": "function", "function": {"name": "add"}}]
    [example], found, message = check("sft", {"conversations": turns, "tools": json.dumps(tools)})
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
    assert message == ""
    assert (example.tools, found.ignored) == (tuple(tools), set())
    assert list(example.messages[1:]) == [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "four", "loss": False},
    ]


@pytest.mark.parametrize("outside", [{}, {"type": "function"}])
def test_bare_tool_schemas_are_wrapped_as_chat_templates_read_them(outside: dict[str, str]) -> None:
    tool = {"name": "add", "parameters": {"type": "object"}}
    [example], _, message = check("sft", {**SHAREGPT, "tools": json.dumps([{**outside, **tool}])})
    assert (message, example.tools) == ("", ({"type": "function", "function": tool},))
    [example], _, message = check("sft", {**SHAREGPT, "tools": ""})
    assert (message, example.tools) == ("", ())


@pytest.mark.parametrize("row", [ALPACA, SHAREGPT], ids=["Alpaca", "ShareGPT"])
def test_an_answer_beside_those_of_a_pair_is_no_part_of_its_prompt(row: dict[str, Any]) -> None:
    pair, _, message = check("pairs", {**row, "chosen": "4", "rejected": "5"})
    assert pair == [] and "the last turn is an answer, and so are chosen and rejected; leave it out" in message
    assert ("data.rename_columns={output: reference}" in message) == (row is ALPACA)


def test_answers_in_sharegpts_spelling_are_read_beside_an_instruction() -> None:
    answers = {side: [{"from": "gpt", "value": side}] for side in ("chosen", "rejected")}
    [pair], _, message = check("pairs", {"instruction": "q", **answers})
    assert (message, list(pair.answers[0].messages)) == ("", chat("q", "chosen"))


@pytest.mark.parametrize("asked", ["question", "instruction", "query"])
def test_whole_conversations_are_pairs_beside_a_column_with_their_question(asked: str) -> None:
    answers = {"chosen": chat("2+2?", "4"), "rejected": chat("2+2?", "5")}
    [pair], found, message = check("pairs", {asked: "2+2?", "prompt": "2+2?", **answers})
    assert (message, found.ignored) == ("", {asked, "prompt"})
    assert [list(answer.messages) for answer in pair.answers] == list(answers.values())


def test_pairs_labels_and_prompts_are_made_of_the_same_rows() -> None:
    [pair], found, message = check(
        "pairs", {"instruction": "add", "input": "", "chosen": "4", "rejected": "5", "id": 1}
    )
    assert message == "" and isinstance(pair, AnswersExample)
    assert [list(answer.messages) for answer in pair.answers if isinstance(answer, ChatExample)] == [
        chat("add", "4"),
        chat("add", "5"),
    ]
    assert found.ignored == {"id"}
    turns = {"chosen": {"from": "gpt", "value": "4"}, "rejected": {"from": "gpt", "value": "5"}}
    turns["chosen"]["score"] = "9"
    [pair], found, message = check("pairs", {"conversations": SHAREGPT["conversations"][:2], **turns})
    assert (message, found.unread) == ("", {"chosen[].score"})
    assert list(pair.answers[1].messages) == chat("2+2?", "5", system="be brief")
    [judged], _, message = check("judged", {**ALPACA, "label": False})
    assert message == "" and (list(judged.answers[0].messages), judged.facts) == (ADDED, {"good": False})
    [prompt], found, message = check("prompts", {**ALPACA, "level": 3})
    assert message == "" and isinstance(prompt, PromptExample)
    assert (list(prompt.prompt), prompt.columns) == (ADDED[:-1], {"answer": "4", "level": 3})
    [question], _, message = check("questions", SHAREGPT)
    assert message == "" and list(question.answers[0].messages) == BRIEF


REJECTED = chat("", "5")[1:]


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"messages": BRIEF, "rejected_response": "5"}, "messages and answers"),  # ms-swift
        ({"messages": BRIEF, "rejected_response": REJECTED}, "messages and answers"),
        ({"system": "be brief", "query": "2+2?", "response": "4", "rejected_response": "5"}, "query/response"),
        ({**SHAREGPT, "rejected_response": "5"}, "ShareGPT"),
        ({"messages": BRIEF[:-1], "chosen": BRIEF[-1], "rejected": REJECTED[0]}, "messages and answers"),  # axolotl
    ],
)
def test_answers_beside_a_conversation_are_pairs(row: dict[str, Any], name: str) -> None:
    [pair], found, message = check("pairs", row)
    assert (message, str(found.format)) == ("", f"{name} → prompt+chosen+rejected (messages)")
    assert [list(answer.messages) for answer in pair.answers] == [BRIEF, [*BRIEF[:-1], *REJECTED]]
    assert {*found.converted, *found.ignored, "chosen", "rejected"} >= row.keys() and found.ignored <= {"id"}


def test_whole_conversations_beside_messages_begin_alike() -> None:
    row = {"messages": BRIEF, "chosen": BRIEF, "rejected": [*BRIEF[:-1], *REJECTED]}
    [pair], found, message = check("pairs", row)
    assert (message, str(found.format)) == ("", "chosen+rejected (messages)")
    assert [list(answer.messages) for answer in pair.answers] == [row["chosen"], row["rejected"]]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": ADDED, "label": False},  # ms-swift
        {**ALPACA, "kto_tag": False},  # LLaMA-Factory
        {"conversations": ADDED, "kto_tag": False},
    ],
)
def test_a_tag_beside_a_conversation_labels_its_last_answer(row: dict[str, Any]) -> None:
    [judged], found, message = check("judged", row)
    assert message == "" and (list(judged.answers[0].messages), judged.facts) == (ADDED, {"good": False})
    assert judged.answers[0].context == len(ADDED) - 1 and not found.ignored


def test_segments_are_trained_on_by_their_labels_and_get_no_token(tmp_path: Path, jsonl: Callable[..., str]) -> None:
    tokenizer = byte_tokenizer(bos=True)
    parts = [("<|bos|>a: ", False), ("b<|im_end|>", True), ("c", False), ("d", True)]
    row = {"segments": [{"text": text, "label": label} for text, label in parts]}
    [item] = data(tokenizer, tmp_path, path=jsonl([row])).take(0, 1)
    assert tokenizer.decode(item.ids) == "<|bos|>a: b<|im_end|>cd"
    assert tokenizer.decode([i for i, w in zip(item.ids, item.weights, strict=True) if w]) == "b<|im_end|>d"
    for wrong in ([], [{"text": "a"}], [{"text": "a", "label": False}], [{"text": "a", "label": "x"}], "text"):
        assert "column segments: expected" in check("sft", {"segments": wrong})[2]


def test_rows_of_token_ids_are_refused_in_words() -> None:
    for reading in ("sft", "pairs", "prompts"):
        assert "rows of token ids (input_ids) are not read" in check(reading, {"input_ids": [1], "labels": [1]})[2]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"conversation": [{"human": "a"}]}, "column conversation: expected a list of objects with the keys human"),
        (
            {"conversations": [{"from": "alien", "value": "x"}]},
            "conversations[0].from: unknown speaker 'alien'; expected",
        ),
        (
            {"conversations": [{"from": "human"}]},
            "conversations[0]: no value; expected the keys from and value, found from",
        ),
        (
            {"conversations": [{"from": "function_call", "value": "add"}]},
            "conversations[0].value: text that is not JSON",
        ),
        (
            {"conversations": [{"from": "function_call", "value": "[" * 100_000}]},
            "conversations[0].value: text that is not JSON (nested too deeply)",
        ),
        (
            {"conversations": [{"from": "function_call", "value": '{"tool": "add"}'}]},
            "expected objects with the keys name and arguments, found",
        ),
        ({**SHAREGPT, "system": "x"}, "a column system and a system turn in conversations; expected one of them"),
        ({**ALPACA, "history": "[]"}, "column history: expected a list of [query, response]"),
        ({**ALPACA, "instruction": None}, "column instruction: expected text, found null"),
        ({**ALPACA, "output": ""}, "the assistant's turn is empty; expected text (read as Alpaca)"),
        ({"query": "a"}, "found query"),
    ],
)
def test_a_fault_names_the_column_of_the_data(row: Any, expected: str) -> None:
    examples, _, message = check("sft", row)
    assert examples == []
    assert expected in message


def test_a_later_row_of_another_format_is_an_error() -> None:
    assert "column instruction: expected text, found null" in check("sft", ALPACA, SHAREGPT)[2]


def test_own_columns_win_over_those_of_other_projects() -> None:
    [example], found, _ = check("sft", {"messages": BRIEF, "conversations": [], "instruction": "x", "output": "y"})
    assert list(example.messages) == BRIEF
    assert found.ignored == {"conversations", "instruction", "output"}


def test_a_file_trains_on_the_same_tokens_in_each_format(
    tokenizer: Any, tmp_path: Path, jsonl: Callable[..., str]
) -> None:
    decide = Decisions(strict=True)
    plain = data(tokenizer, tmp_path, path=jsonl([{"messages": BRIEF}], "a.jsonl"))
    found = data(tokenizer, tmp_path, decide, path=jsonl([SHAREGPT], "b.jsonl"))
    assert found.take(0, 1) == plain.take(0, 1)
    assert "be brief" in texts(tokenizer, found, 0, 1)[0]
    assert "ShareGPT → messages" in said(decide, "data.format")[0]
    assert "made of conversations" in said(decide, "data.format")[0]
    assert "not read: id" in said(decide, "data.rename_columns")[0]


def test_an_answer_that_would_be_lost_is_refused() -> None:
    assert "the last turn and the column answer are two completions" in check("prompts", {**ALPACA, "answer": "5"})[2]
    call = {"from": "function_call", "value": '{"name": "add", "arguments": {}}'}
    row = {"conversations": [SHAREGPT["conversations"][1], call]}
    assert "the last turn is a tool call; use a column `prompt`" in check("prompts", row)[2]


VERL: dict[str, Any] = {
    "data_source": "math",
    "prompt": [{"role": "user", "content": "2+2?"}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "4", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": 7},
}


def test_what_verl_rows_are_scored_by_is_the_answer() -> None:
    [prompt], found, message = check("prompts", VERL)
    assert message == "" and isinstance(prompt, PromptExample)
    assert (str(found.format), found.converted) == ("verl → prompt (messages)", {"reward_model.ground_truth"})
    assert prompt.columns == {name: value for name, value in VERL.items() if name != "prompt"} | {"answer": "4"}
    assert found.reward_columns >= {"answer", "reward_model", "reward_model.ground_truth", "extra_info.index"}
    [question], _, message = check("questions", VERL)
    assert message == "" and list(question.answers[0].messages) == chat("2+2?", "4")
    [prompt], found, _ = check("prompts", {**VERL, "prompt": "2+2?", "answer": "Answer: 2"})
    assert (prompt.prompt, prompt.columns["answer"]) == ("2+2?", "4")
    assert found.unread == {"answer (replaced by reward_model.ground_truth)"}
    later = check("prompts", VERL, {"prompt": VERL["prompt"]})[2]
    assert "no column reward_model.ground_truth or reward_spec.ground_truth; found " in later
    other = {**VERL, "reward_model": {"ground_truth": {"target": ["4"]}}}
    assert (
        "column answer: expected text or a number, found an object with the keys target" in check("questions", other)[2]
    )
