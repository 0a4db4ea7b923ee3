"""Columns and keys of the data formats of other projects: each is read, or the run says that it is not.

Sources of the names: the pages on data of TRL, verl, ms-swift, LLaMA-Factory, axolotl, OpenRLHF, SkyRL, NeMo-RL, AReaL,
prime-rl and OpenAI's fine-tuning, and the cards of data sets that these name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from runner.data.examples import AnswersExample, ChatExample, Example, PromptExample, Reading
from tests.data.conftest import chat
from tests.data.test_conversions import check

USER, GOOD, BAD = chat("2+2?")[0], *({"role": "assistant", "content": text} for text in "45")
TALK, WRONG, BRIEF = [USER, GOOD], [USER, BAD], chat("2+2?", "4", system="be brief")
CALL = json.dumps({"name": "add", "arguments": {"b": 2, "a": 2}})
CALLED = {"type": "function", "function": {"name": "add", "arguments": {"b": 2, "a": 2}}}
Messages = list[dict[str, Any]]

# The row, the conversations or the prompt that are read from it, and the columns and keys that the run says are not.
READ: list[tuple[str, Reading, dict[str, Any], list[Messages], set[str]]] = [
    ("TRL", "sft", {"messages": TALK, "chat_template_kwargs": {}}, [TALK], set()),
    (
        "TRL",
        "pairs",
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD], "score_chosen": 1},
        [TALK, WRONG],
        {"score_chosen"},
    ),
    ("TRL", "judged", {"prompt": [USER], "completion": [GOOD], "label": True}, [TALK], set()),
    (
        "ms-swift",
        "sft",
        {"messages": [USER, {**GOOD, "loss_scale": 0.5}], "channel": "a"},
        [[USER, {**GOOD, "loss_scale": 0.5}]],
        {"channel", "messages[].loss_scale"},
    ),
    ("ms-swift", "pairs", {"messages": TALK, "rejected_response": "5", "margin": 2}, [TALK, WRONG], set()),
    (
        "ms-swift",
        "pairs",
        {"messages": TALK, "rejected_messages": WRONG, "rejected_images": []},
        [TALK, WRONG],
        {"rejected_images"},
    ),
    ("ms-swift", "pairs", {"query": "2+2?", "response": "4", "rejected_response": "5"}, [TALK, WRONG], set()),
    ("ms-swift", "judged", {"messages": TALK, "label": False}, [TALK], set()),
    ("ms-swift", "prompts", {"messages": [USER], "solution": "4"}, [[USER]], set()),
    (
        "ms-swift",
        "sft",
        {
            "messages": [
                USER,
                {"role": "assistant", "content": "I add"},
                *[{"role": "tool_call", "content": CALL}] * 2,
                *[{"role": "tool_response", "content": "4"}] * 2,
                GOOD,
            ]
        },
        [
            [
                USER,
                {"role": "assistant", "content": "I add", "tool_calls": [CALLED] * 2},
                *[{"role": "tool", "content": "4"}] * 2,
                GOOD,
            ]
        ],
        set(),
    ),
    ("LLaMA-Factory", "judged", {"instruction": "2+2?", "input": "", "output": "4", "kto_tag": True}, [TALK], set()),
    ("LLaMA-Factory", "pairs", {"messages": [USER], "chosen": GOOD, "rejected": BAD}, [TALK, WRONG], set()),
    (
        "axolotl chatml.intel",
        "pairs",
        {"system": "be brief", "question": "2+2?", "chosen": "4", "rejected": "4!"},
        [BRIEF, [*BRIEF[:2], {**GOOD, "content": "4!"}]],
        set(),
    ),
    (
        "axolotl",
        "sft",
        {"messages": [USER, {**GOOD, "train_detail": []}]},
        [[USER, {**GOOD, "train_detail": []}]],
        {"messages[].train_detail"},
    ),
    ("OpenOrca", "sft", {"system_prompt": "be brief", "question": "2+2?", "response": "4"}, [BRIEF], set()),
    (
        "Gemma",
        "sft",
        {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "model", "value": "4"}]},
        [TALK],
        set(),
    ),
    (
        "verl",
        "prompts",
        {"prompt": [USER], "reward_model": {"ground_truth": "4"}, "agent_name": "tool"},
        [[USER]],
        set(),
    ),
    (
        "verl",
        "sft",
        {"messages": TALK, "enable_thinking": True},
        [TALK],
        {"variable of the chat template: enable_thinking"},
    ),
    (
        "SkyRL",
        "prompts",
        {"prompt": [USER], "env_class": "gsm8k", "reward_spec": {"ground_truth": "4"}},
        [[USER]],
        set(),
    ),
    ("AReaL", "prompts", {"messages": [USER], "answer": "4"}, [[USER]], set()),
    ("prime-rl", "sft", {"prompt": [USER], "completion": [GOOD], "tool_defs": "[]"}, [TALK], {"tool_defs"}),
    ("OpenAI", "prompts", {"messages": TALK, "reference_answer": "4"}, [[USER]], set()),
    (
        "UltraFeedback",
        "pairs",
        {"prompt": "2+2?", "chosen": TALK, "rejected": WRONG, "messages": TALK},
        [TALK, WRONG],
        {"prompt", "messages"},
    ),
]
# Rows that are not read; the error names the columns that were found, and what to type.
REFUSED: list[tuple[str, Reading, dict[str, Any], str]] = [
    ("TRL", "sft", {"prompt": "a", "completions": ["b"], "labels": [True]}, "found prompt, completions, labels"),
    ("TRL", "sft", {"input_ids": [1], "labels": [1]}, "found input_ids, labels"),
    ("axolotl", "sft", {"segments": []}, "column segments: expected labels true or false, at least one of them true"),
    (
        "axolotl chatml.icr",
        "pairs",
        {"input": "2+2?", "chosen": "It is 4", "rejected": "It is 5"},
        "type 'data.rename_columns={input: prompt}'",
    ),
    (
        "axolotl chatml.argilla",
        "pairs",
        {"instruction": "a", "chosen_response": "b", "rejected_response": "c"},
        "chosen_response: chosen, rejected_response: rejected",
    ),
    (
        "ms-swift",
        "pairs",
        {"messages": TALK, "rejected_response": 5},
        "column rejected: expected a list of messages, found a number",
    ),
    (
        "OpenRLHF",
        "prompts",
        {"context_messages": [USER], "label": "4"},
        "type 'data.rename_columns={context_messages: prompt}'",
    ),
    (
        "OpenRLHF",
        "sft",
        {"input": "a", "output": "b"},
        "type 'data.rename_columns={input: prompt, output: completion}'",
    ),
    ("NeMo-RL", "pairs", {"context": [USER], "completions": []}, "found context, completions"),
    ("WildChat", "sft", {"conversation": TALK}, "type 'data.rename_columns={conversation: messages}'"),
    (
        "OpenAI",
        "pairs",
        {"input": {}, "preferred_output": [GOOD], "non_preferred_output": [BAD]},
        "preferred_output: chosen, non_preferred_output: rejected",
    ),
    (
        "OpenHermes",
        "sft",
        {"conversations": [{"from": "human", "value": "a"}], "system": "a", "system_prompt": "b"},
        "the columns system and system_prompt both hold a system prompt",
    ),
]


def conversations(example: Example) -> list[list[Mapping[str, Any]]]:
    if isinstance(example, AnswersExample):
        return [list(answer.messages) for answer in example.answers if isinstance(answer, ChatExample)]
    assert isinstance(example, ChatExample | PromptExample)
    return [[*(example.messages if isinstance(example, ChatExample) else example.prompt)]]


@pytest.mark.parametrize(("project", "reading", "row", "expected", "unread"), READ)
def test_a_public_format_is_read(
    project: str, reading: Reading, row: dict[str, Any], expected: list[Messages], unread: set[str]
) -> None:
    [example], found, message = check(reading, row)
    assert (conversations(example), message) == (expected, "")
    assert found.ignored | found.unread == unread
    if reading == "prompts":
        assert found.reward_columns >= row.keys() - {"prompt", "messages"}


@pytest.mark.parametrize(("project", "reading", "row", "expected"), REFUSED)
def test_a_public_format_that_is_not_read_is_an_error_with_its_columns(
    project: str, reading: Reading, row: dict[str, Any], expected: str
) -> None:
    examples, _, message = check(reading, row)
    assert examples == []
    assert expected in message
