"""The first row decides the format, every later row must keep to it."""

from __future__ import annotations

from typing import Any

import pytest

from runner.data.examples import ChatExample, Reading, TextExample
from runner.data.formats import FormatCheck
from runner.data.readers import Problems, Row, SourceLocation
from tests.data.conftest import chat

TALK = chat("2+2?", "4")
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def check(*rows: dict[str, Any], reading: Reading = "sft") -> tuple[list[Any], FormatCheck, str]:
    """Examples, the check, and the error's text or nothing."""
    problems = Problems("data.path", "a.jsonl")
    found = FormatCheck(problems, reading)
    examples = list(found.examples(Row(SourceLocation("a.jsonl", i), row) for i, row in enumerate(rows, 1)))
    return examples, found, str(problems.error()) if problems.count else ""


@pytest.mark.parametrize(
    ("row", "form", "example"),
    [
        ({"text": "a"}, "text", TextExample(SourceLocation("a.jsonl", 1), None, "a")),
        (
            {"prompt": "a", "completion": "b"},
            "prompt+completion (text)",
            TextExample(SourceLocation("a.jsonl", 1), "a", "b"),
        ),
        ({"messages": TALK}, "messages", ChatExample(SourceLocation("a.jsonl", 1), tuple(TALK))),
        (
            {"prompt": TALK[:1], "completion": TALK[1:]},
            "prompt+completion (messages)",
            ChatExample(SourceLocation("a.jsonl", 1), tuple(TALK), context=1),
        ),
        (
            {"messages": TALK, "tools": TOOLS},
            "messages",
            ChatExample(SourceLocation("a.jsonl", 1), tuple(TALK), 0, tuple(TOOLS)),
        ),
        (
            {"messages": TALK, "tools": '[{"type": "function", "function": {"name": "add"}}]'},
            "messages",
            ChatExample(SourceLocation("a.jsonl", 1), tuple(TALK), 0, tuple(TOOLS)),
        ),
        ({"messages": TALK, "tools": None}, "messages", ChatExample(SourceLocation("a.jsonl", 1), tuple(TALK))),
    ],
)
def test_each_format_is_detected(row: dict[str, Any], form: str, example: Any) -> None:
    examples, found, message = check(row)
    assert (examples, str(found.format), message) == ([example], form, "")


def test_a_conversation_wins_over_a_prompt_and_ignored_columns_are_known() -> None:
    examples, found, _ = check({"prompt": "a", "messages": TALK, "id": 3}, {"messages": TALK, "score": 1})
    assert len(examples) == 2
    assert str(found.format) == "messages"
    assert found.ignored == {"prompt", "id", "score"}


def test_tools_beside_plain_text_are_not_read_and_this_is_known() -> None:
    assert check({"text": "a", "tools": TOOLS})[1].ignored == {"tools"}


BAD_FIRST = [
    ({"question": "a", "answer": "b"}, "found question, answer"),
    ({}, "found no column"),
    ({"prompt": "a"}, "`prompt` alone has no completion to train on"),
    ({"chosen": "a", "rejected": "b"}, "preference pairs"),
    ({"conversations": []}, "found no message (read as ShareGPT)"),
    ({"text": 3}, "column text: expected text, found a number"),
    ({"text": None}, "column text: expected text, found null"),
    ({"text": " \n"}, "column text is empty"),
    ({"prompt": "", "completion": "b"}, "column prompt is empty"),
    ({"prompt": "a", "completion": "  "}, "column completion is empty"),
    ({"prompt": [], "completion": TALK[1:]}, "column prompt is empty"),
    ({"prompt": TALK[:1], "completion": []}, "the completion has no assistant turn"),
    ({"prompt": TALK[:1], "completion": chat("c")}, "the completion has no assistant turn"),
    ({"prompt": TALK[:1], "completion": "b"}, "column completion: expected a list of messages, found text"),
    ({"messages": []}, "the conversation has no assistant turn; expected a message with role assistant"),
    ({"messages": TALK[:1]}, "the conversation has no assistant turn"),
    ({"messages": "a"}, "column messages: expected a list of messages, found text"),
    ({"messages": ["a"]}, "column messages: expected a list of messages, found a list"),
    ({"messages": [*TALK, {"role": "asistant", "content": "x"}]}, "messages[2].role: unknown role 'asistant'; did you"),
    ({"messages": [{"content": "x"}]}, "messages[0]: no role; expected the keys role and content, found content"),
    ({"messages": [{"from": "human", "value": "x"}]}, "found user (read as ShareGPT)"),
    ({"messages": [{"role": 3, "content": "x"}]}, "messages[0].role: expected text, found a number"),
    ({"messages": [{"role": "user"}]}, "messages[0]: no content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content: expected text, found a number"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}]},
        "more places for images than the 0 of the column images; expected one of each",
    ),
    ({"messages": chat("", "b")}, "messages[0].content: the user's turn is empty"),
    ({"messages": chat("a", " ")}, "messages[1].content: the assistant's turn is empty"),
    ({"prompt": chat("a"), "completion": [{"role": "assistant", "content": ""}]}, "completion[0].content: the assist"),
    ({"messages": [TALK[0], {"role": "assistant", "content": None}]}, "messages[1].content: expected text, found null"),
    ({"messages": TALK, "tools": "{"}, "column tools: text that is not JSON"),
    ({"messages": TALK, "tools": 3}, "column tools: expected a list of JSON schemas, found a number"),
]


@pytest.mark.parametrize(("row", "expected"), BAD_FIRST)
def test_what_is_wrong_with_a_row_is_said(row: dict[str, Any], expected: str) -> None:
    examples, _, message = check(row)
    assert examples == []
    assert "a.jsonl:1: " in message
    assert expected in message


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ({"text": "a"}, {"txt": "b"}, "a.jsonl:2: no column text; expected text as at a.jsonl:1, found txt"),
        ({"prompt": "a", "completion": "b"}, {"prompt": "a"}, "a.jsonl:2: no column completion"),
        (
            {"prompt": "a", "completion": "b"},
            {"prompt": TALK[:1], "completion": TALK[1:]},
            "expected text as at a.jsonl:1",
        ),
        ({"messages": TALK}, {"text": "a"}, "a.jsonl:2: no column messages; expected messages as at a.jsonl:1"),
        ({"text": "a"}, {"text": 0}, "a.jsonl:2: column text: expected text as at a.jsonl:1, found a number"),
    ],
)
def test_a_later_row_of_another_format_is_an_error(first: Any, second: Any, expected: str) -> None:
    assert expected in check(first, second)[2]


def test_roles_and_calls_that_are_sound() -> None:
    talk = [
        {"role": "system", "content": ""},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function"}]},
        {"role": "tool", "content": ""},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "thanks"},
    ]
    assert check({"messages": talk})[2] == ""


def test_all_faults_are_reported_at_once_except_after_an_unknown_format() -> None:
    assert "3 problems" in check({"text": "a"}, {"text": ""}, {"text": 1}, {})[2]
    assert "1 problem\n" in check({"q": "a"}, {"q": "b"}, {"q": "c"})[2]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"weight": 0}, "every assistant turn of the conversation is excluded (here by weight: 0)"),
        ({"loss": False}, "every assistant turn of the conversation is excluded (here by loss: false)"),
        ({"masked": True}, "every assistant turn of the conversation is excluded (here by masked: true)"),
        ({"weight": "no"}, "messages[1].weight: expected true or false, or 1 or 0, found 'no'"),
        ({"loss_mask": 0.5}, "messages[1].loss_mask: expected true or false, or 1 or 0, found 0.5"),
        ({"train": True, "trainable": 0}, "messages[1]: trainable: 0, train: true contradict each other"),
        ({"images": ["a.png"]}, "messages[1].images: only text can be trained on"),
    ],
)
def test_training_flags_are_true_or_false_agree_and_leave_something_to_learn(flags: dict[str, Any], said: str) -> None:
    talk = [TALK[0], TALK[1] | flags]
    assert said in check({"messages": talk})[2]


def test_a_flag_of_a_completion_that_counts_as_a_whole_is_refused() -> None:
    row = {"prompt": TALK[:1], "chosen": [TALK[1] | {"loss": False}], "rejected": [TALK[1]]}
    assert "column chosen: every token of it counts, so loss: false has no effect" in check(row, reading="pairs")[2]


def test_keys_of_messages_that_nothing_reads_are_known() -> None:
    talk = [TALK[0] | {"train": True, "name": "Ann"}, TALK[1] | {"loss": True, "channel": "final", "id": 7}]
    assert check({"messages": talk})[1].unread == {"messages[].train (role user)", "messages[].channel"}


PICTURE = {"messages": TALK, "images": ["cat.png"]}
FILM = {"messages": TALK, "videos": ["cat.mp4"]}
PARTS = [{"role": "user", "content": [{"text": "a", "image": "b.png"}]}, TALK[1]]
OLD_CALL = {"role": "assistant", "content": "let me see", "function_call": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (PICTURE, "the image cat.png: a path needs a folder; type data.media_root=FOLDER"),
        (FILM, "column videos: video and sound cannot be trained on; to leave it out, type 'data.rename_columns="),
        ({"messages": PARTS}, "messages[0].content: expected parts of type text or image, found the keys text, image"),
        ({"messages": [TALK[0], OLD_CALL]}, "messages[1].function_call: an older form of tool calls"),
    ],
)
def test_pictures_are_refused_in_words(row: dict[str, Any], text: str) -> None:
    assert text in check(row)[2]


def test_a_renamed_column_of_pictures_is_left_out() -> None:
    found = FormatCheck(Problems("data.path", "a.jsonl"), "sft", {"images": "unused_images"})
    assert len(list(found.examples([Row(SourceLocation("a.jsonl", 1), PICTURE)]))) == 1
    assert found.ignored == {"unused_images"}
