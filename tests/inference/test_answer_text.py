"""Text out of ids, and reasoning, content and calls out of text, whatever the pieces are."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.inference.answer_text import ChatAnswer, TextStream, ToolCall, parse_calls
from runner.model.tiny import byte_tokenizer

TOKENIZER = byte_tokenizer(512)
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call>'
MADE = ToolCall("f", '{"x": "é"}')


def split(
    text: str, sizes: list[int], *, tools: bool = True, is_thinking: bool = False
) -> tuple[str, str, list[ToolCall]]:
    """Reasoning, content and calls of a text that comes in pieces of these sizes."""
    answer, parts, at = ChatAnswer(tools, is_thinking), {"reasoning": "", "content": ""}, 0
    for size in [*sizes, len(text)]:
        for part, piece in answer.push(text[at : at + size]):
            parts[part] += piece
        at += size
    for part, piece in answer.close():
        parts[part] += piece
    return parts["reasoning"], parts["content"], answer.calls


CASES = {
    "plain\n": ("", "plain\n", []),
    "<think>\nhm\n\n</think>\n\nyes": ("hm", "yes", []),
    "<think>\n\n</think>\n\nyes\nno\n": ("", "yes\nno\n", []),
    "<think>never closed": ("never closed", "", []),
    f"I call.\n{CALL}\n{CALL}": ("", "I call.", [MADE, MADE]),
    f"<think>a</think>{CALL}\nthen": ("a", "then", [MADE]),
    CALL: ("", "", [MADE]),
    "<tool_call>broken</tool_call> text": ("", "<tool_call>broken</tool_call> text", []),
    "<tool_call>\n{": ("", "<tool_call>\n{", []),
    '{"name": "f", "parameters": {"x": "é"}}': ("", "", [MADE]),
    '<|python_tag|>{"name": "f", "parameters": {"x": "é"}}; {"name": "f", "parameters": {"x": "é"}}': (
        "",
        "",
        [MADE] * 2,
    ),
    '{"answer": 3}': ("", '{"answer": 3}', []),
    "a < b, <tool, <thin": ("", "a < b, <tool, <thin", []),
    "": ("", "", []),
}


@pytest.mark.parametrize("text", CASES)
@given(sizes=st.lists(st.integers(1, 12), max_size=20))
def test_the_parts_of_an_answer_do_not_depend_on_its_pieces(text: str, sizes: list[int]) -> None:
    assert split(text, sizes) == CASES[text]


def test_a_prompt_that_opens_the_reasoning_is_continued() -> None:
    assert split("\nhm\n</think>\n\nyes", [1] * 5, is_thinking=True) == ("hm", "yes", [])


def test_without_tools_a_call_is_text() -> None:
    assert split(f"{CALL}\n", [3] * 9, tools=False) == ("", f"{CALL}\n", [])


@given(st.dictionaries(st.text(), st.integers() | st.text()))
def test_any_arguments_are_read(arguments: dict[str, int | str]) -> None:
    text = json.dumps({"name": "f", "arguments": arguments})
    [call] = parse_calls(text)
    assert json.loads(call.arguments) == arguments


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
