"""Reasoning, content and calls out of text, whatever the pieces are; calls → chat template → calls in each format."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from runner.core.chat_answer import ChatAnswer
from runner.core.tool_formats import FORMATS, ToolCall
from runner.data.chat import Renderer
from runner.data.chat_template import TEMPLATES as SHIPPED
from runner.data.config import ChatConfig
from runner.model.tiny import CHAT_TEMPLATE
from tests.data.chat_families import DEEPSEEK, family_tokenizer, trl_template

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call>'
MADE = ToolCall("f", {"x": "é"})
XML = "<function=f>\n<parameter=x>\né\n</parameter>\n</function>"
JSON_CALL = '{"name": "f", "parameters": {"x": "é"}}'
ANALYSIS = "<|channel|>analysis<|message|>hm<|end|>"
HARMONY_HEADER = "<|channel|>commentary to=functions.f <|constrain|>json"
HARMONY_CALL = f'<|start|>assistant{HARMONY_HEADER}<|message|>{{"x": "é"}}<|call|>'


def read(
    text: str, sizes: list[int], name: str | None = "hermes", *, is_thinking: bool = False, tools: Any = ()
) -> tuple[str, str, list[ToolCall]]:
    """Reasoning, content and calls of a text that comes in pieces of these sizes."""
    answer, parts, at = (
        ChatAnswer(FORMATS[name] if name else None, is_thinking, tools),
        {"reasoning": "", "content": ""},
        0,
    )
    for size in [*sizes, len(text)]:
        for part, piece in answer.push(text[at : at + size]):
            parts[part] += piece
        at += size
    for part, piece in answer.close():
        parts[part] += piece
    assert bool(answer.errors) == ("tool_call>" in parts["content"] and name is not None)
    return parts["reasoning"], parts["content"], answer.calls


CASES = {
    ("hermes", CALL.replace("é", r"\ud83d")): ("", CALL.replace("é", r"\ud83d"), []),
    ("hermes", CALL.replace("é", r"\ud83d\ude00")): ("", "", [ToolCall("f", {"x": "\U0001f600"})]),
    ("hermes", "plain\n"): ("", "plain\n", []),
    ("hermes", "<think>\nhm\n\n</think>\n\nyes"): ("hm", "yes", []),
    ("hermes", "<think>\n\n</think>\n\nyes\nno\n"): ("", "yes\nno\n", []),
    ("hermes", "<think>a</think>\n\n<think> is a tag."): ("a", "<think> is a tag.", []),
    ("hermes", "<think>never closed"): ("never closed", "", []),
    ("hermes", f"I call.\n{CALL}\n{CALL}"): ("", "I call.", [MADE, MADE]),
    ("hermes", f"<think>a</think>{CALL}\nthen"): ("a", "then", [MADE]),
    ("hermes", CALL): ("", "", [MADE]),
    ("hermes", "<tool_call>broken</tool_call> text"): ("", "<tool_call>broken</tool_call> text", []),
    ("hermes", f"<tool_call>broken</tool_call>{CALL}"): ("", "<tool_call>broken</tool_call>", [MADE]),
    ("hermes", "<tool_call>\n{"): ("", "<tool_call>\n{", []),
    ("hermes", '{"answer": 3}'): ("", '{"answer": 3}', []),
    ("hermes", "a < b, <tool, <thin"): ("", "a < b, <tool, <thin", []),
    ("hermes", ""): ("", "", []),
    ("llama3", JSON_CALL): ("", "", [MADE]),
    ("llama3", f"<|python_tag|>{JSON_CALL}; {JSON_CALL}"): ("", "", [MADE] * 2),
    ("llama3", f"<think>\na\n</think>\n\n{JSON_CALL}"): ("a", "", [MADE]),
    ("llama3", f"<think>a</think><|python_tag|>{JSON_CALL}"): ("a", "", [MADE]),
    ("llama3", "<think>a</think>\n\n{1, 2} is the set."): ("a", "{1, 2} is the set.", []),
    ("llama3", "<think>a</think>\n\n<|python"): ("a", "<|python", []),
    ("llama3", ' {"answer": {"name": "é"}}'): ("", '{"answer": {"name": "é"}}', []),
    ("llama3", "{1, 2} is the set."): ("", "{1, 2} is the set.", []),
    ("qwen_xml", f"<tool_call>\n{XML}\n</tool_call>\n<tool_call>\n{XML}\n</tool_call>"): ("", "", [MADE, MADE]),
    ("qwen_xml", f"So:\n{XML}\n</tool_call>\n{XML}\n</tool_call>"): ("", "So:", [MADE, MADE]),
    ("qwen_xml", f"{XML}\n"): ("", "", [MADE]),
    ("qwen_xml", "<function=f> is no call</tool_call>"): ("", "<function=f> is no call</tool_call>", []),
    ("qwen_xml", "a <function, <tool"): ("", "a <function, <tool", []),
    ("mistral", 'So:[TOOL_CALLS]f[ARGS]{"x": "é"}[TOOL_CALLS]f[CALL_ID]abc[ARGS]{"x": "é"}'): ("", "So:", [MADE] * 2),
    ("deepseek", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": "é"}<｜tool▁call▁end｜>'): (
        "",
        "",
        [MADE],
    ),
    ("gpt_oss", f"{ANALYSIS}{HARMONY_CALL}"): ("hm", "", [MADE]),
    ("gpt_oss", f"{ANALYSIS}<|start|>assistant<|channel|>final<|message|>yes"): ("hm", "yes", []),
    ("gpt_oss", f"{ANALYSIS}{HARMONY_CALL}<|start|>assistant<|channel|>final<|message|>ye"): ("hm", "ye", [MADE]),
    ("gpt_oss", f"{ANALYSIS}{HARMONY_CALL}<|start|>assistant<|channel|>fin"): ("hm", "", [MADE]),
    ("gpt_oss", f"{ANALYSIS}<|start|>"): ("hm", "", []),
    ("gpt_oss", "<|channel|>analysis<|message|>h"): ("h", "", []),
    ("gpt_oss", "<|channel|>ana"): ("", "", []),
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {case[1][:20]}")
@given(sizes=st.lists(st.integers(1, 12), max_size=20))
def test_the_parts_of_an_answer_do_not_depend_on_its_pieces(case: tuple[str, str], sizes: list[int]) -> None:
    assert read(case[1], sizes, case[0]) == CASES[case]


def test_a_prompt_that_opens_the_reasoning_is_continued() -> None:
    assert read("\nhm\n</think>\n\nyes", [1] * 5, is_thinking=True) == ("hm", "yes", [])


def test_without_a_format_a_call_is_text() -> None:
    assert read(f"{CALL}\n", [3] * 9, None) == ("", f"{CALL}\n", [])


@pytest.mark.parametrize(
    "text", ['{"name": "f"}', '{"name": "f", "param', '{"name": "f", "parameters": [1]}', '<|python_tag|>{"answer": 3}']
)
def test_a_turn_of_json_that_is_no_call_is_content_and_an_error(text: str) -> None:
    answer = ChatAnswer(FORMATS["llama3"])
    assert [*answer.push(text), *answer.close()] == [("content", text)]
    assert len(answer.errors) == 1 and not answer.calls


@pytest.mark.parametrize("cut", [HARMONY_HEADER, f'{HARMONY_HEADER}<|message|>{{"x": "'])
def test_of_a_turn_with_channels_only_the_call_that_was_cut_is_content_and_an_error(cut: str) -> None:
    answer = ChatAnswer(FORMATS["gpt_oss"])
    parts = [*answer.push(f"{ANALYSIS}{HARMONY_CALL}<|start|>assistant{cut}"), *answer.close()]
    assert parts == [("reasoning", "hm"), ("content", cut)]
    assert answer.calls == [MADE] and len(answer.errors) == 1


MISTRAL = (  # of the kind of Mistral's templates since version 3
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}{% set f = c.function %}"
    '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]{{ eos_token }}"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS] {\"content\": {{ m.content | tojson }}, "
    '"call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
TEMPLATES = {  # name → (format, template, beginning, end, several calls in one turn)
    "tiny": ("hermes", CHAT_TEMPLATE, "<|im_start|>", "<|im_end|>", True),
    "qwen2_5": ("hermes", "qwen2_5", "<|endoftext|>", "<|im_end|>", True),
    "qwen3": ("hermes", "qwen3", "<|endoftext|>", "<|im_end|>", True),
    "qwen3_5": ("qwen_xml", "qwen3_5_think", "<|endoftext|>", "<|im_end|>", True),
    "llama3_2": ("llama3", "llama3_2", "<|begin_of_text|>", "<|eot_id|>", False),
    "mistral": ("mistral", MISTRAL, "<s>", "</s>", True),
    "deepseek": ("deepseek", (SHIPPED / "deepseek_r1.jinja").read_text(), *DEEPSEEK, True),
    "glm4moe": ("glm", "glm4moe", "[gMASK]", "<|endoftext|>", True),
    "gptoss": ("gpt_oss", "gptoss", "<|startoftext|>", "<|return|>", False),
}


@cache
def renderer(name: str) -> Renderer:
    _, template, begin, end, _ = TEMPLATES[name]
    source = template if "{" in template else trl_template(template)
    return Renderer(family_tokenizer(source, begin, end), ChatConfig(date="2026-01-01"))


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_format_is_that_of_the_template(name: str) -> None:
    found = renderer(name).template.tool_format
    assert found is not None and found.name == TEMPLATES[name][0]


def test_a_template_without_calls_has_no_format() -> None:
    assert Renderer(family_tokenizer(trl_template("phi3"), "<s>", "<|endoftext|>")).template.tool_format is None


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "a tool",
            "parameters": {
                "type": "object",
                "properties": {"text": {"type": "string"}, "count": {"type": "integer"}, "rows": {"type": "array"}},
            },
        },
    }
    for name in ("look_up", "add")
]
# Characters that no format without JSON can quote: those of its own marks; line ends beside them are not kept either
TEXTS = st.text(st.characters(exclude_characters="<>\r", exclude_categories=["C", "Zl", "Zp", "Z"]), min_size=1)
ARGUMENTS = st.fixed_dictionaries(
    {"text": TEXTS},
    optional={
        "count": st.integers(-(10**9), 10**9),
        "rows": st.lists(TEXTS | st.integers(0, 9) | st.booleans(), max_size=3),
    },
)
CALLS = st.builds(ToolCall, st.sampled_from(["look_up", "add"]), ARGUMENTS)


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=40, deadline=None)
@given(calls=st.lists(CALLS, min_size=1, max_size=3), sizes=st.lists(st.integers(1, 40), max_size=8))
@example(calls=[ToolCall("add", {"text": "7", "count": 7, "rows": [True, "7", 7]})], sizes=[3])
def test_calls_that_the_template_writes_are_read_again(name: str, calls: list[ToolCall], sizes: list[int]) -> None:
    kind, _, _, _, several = TEMPLATES[name]
    calls = calls if several else calls[:1]
    made = [
        {"type": "function", "id": f"call{at:05}", "function": {"name": c.name, "arguments": c.arguments}}
        for at, c in enumerate(calls)
    ]
    one = renderer(name)
    [row] = one.render([{"role": "user", "content": "go"}, {"role": "assistant", "content": "", "tool_calls": made}])
    turn = "".join(segment.text for segment in row if segment.is_trained)
    ends = sorted(one.template.end_tokens, key=len)
    text = next((turn.rstrip().removesuffix(end) for end in ends if turn.rstrip().endswith(end)), turn)
    opened = "".join(segment.text for segment in row if not segment.is_trained).rstrip().endswith("<think>")
    reasoning, content, found = read(text, sizes, kind, is_thinking=opened, tools=TOOLS)
    assert (reasoning.strip(), content.strip()) == ("", "")
    assert json.dumps([[c.name, c.arguments] for c in found]) == json.dumps([[c.name, c.arguments] for c in calls])


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_turn_is_read_without_an_exception_and_loses_no_text(name: str, data: st.DataObject) -> None:
    """Malformed turns: marks and scraps of calls in any order. What is no call stays as text."""
    one = FORMATS[name]
    scraps = st.sampled_from(
        [*one.opens, one.closes, *one.special, '{"name": "f"', '"arguments": {', "}", "[", "\n", "f", '"']
    )
    text = "".join(data.draw(st.lists(scraps | st.text(max_size=3), max_size=12)))
    answer = ChatAnswer(one)
    pieces = [*answer.push(text), *answer.close()]
    if not answer.calls and not one.has_channels:
        said = "".join(piece for _, piece in pieces)
        assert "".join(said.split()) == "".join(text.split())
