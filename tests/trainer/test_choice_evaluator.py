"""Multiple choice by log-likelihood: against a plain forward pass of transformers, in training and in `run eval`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from runner.cli.job_builder import compose_job
from runner.core.errors import DataError, SpecError
from runner.trainer.choice_evaluator import option_row
from tests import command
from tests.small import TINY

ROWS = [
    {"prompt": "Question: which digit is larger, 3 or 7?\nAnswer:", "options": [" 3", " 7"], "answer": 1},
    {"prompt": "The first letter is", "options": [" a, of course", " b", " z"], "answer": " a, of course"},
    {"prompt": "Choose A or B\n", "options": ["A", "B"], "answer": "B"},
]
SET = "evaluation.sets.mine={data: {name: file, path: rows.jsonl, cache: false}, choices: options}"


@torch.no_grad()
def reference(export: Path, row: dict[str, Any]) -> list[float]:
    """log p(option | prompt) as lm-eval's model `hf` computes it."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(export), AutoTokenizer.from_pretrained(export)
    found = []
    for option in row["options"]:
        whole = tokenizer(row["prompt"] + option, add_special_tokens=False)["input_ids"]
        before = len(tokenizer(row["prompt"].rstrip(), add_special_tokens=False)["input_ids"])
        logprobs = model(torch.tensor([whole])).logits[0].log_softmax(-1)
        found.append(sum(float(logprobs[at - 1, whole[at]]) for at in range(before, len(whole))))
    return found


def test_the_log_likelihoods_are_those_of_a_plain_forward_pass_in_training_and_afterwards(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    words = [*TINY, "steps=2", "evaluation.every=2", "schedule.warmup_steps=1", SET]
    command.run(
        *words,
        "callbacks=stop_when",
        *(f"callbacks.stop_when.{o}" for o in ("metric=eval/mine/accuracy", "patience=9")),
        cwd=tmp_path,
    )
    run = tmp_path / "outputs/latest"
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    wanted = [reference(run / "export", row) for row in ROWS]
    right = [1, 0, 1]
    assert last["eval/mine/accuracy"] == sum(v.index(max(v)) == r for v, r in zip(wanted, right, strict=True)) / 3
    by_length = [
        [v / len(o) for v, o in zip(vs, row["options"], strict=True)] for vs, row in zip(wanted, ROWS, strict=True)
    ]
    assert (
        last["eval/mine/accuracy_norm"] == sum(v.index(max(v)) == r for v, r in zip(by_length, right, strict=True)) / 3
    )
    command.run("eval", "latest", SET, cwd=tmp_path)
    [samples] = (tmp_path / "outputs/eval").glob("2*/samples.jsonl")
    found = [json.loads(line)["logprobs"] for line in samples.read_text().splitlines()]
    assert [value for values in found for value in values] == pytest.approx([v for vs in wanted for v in vs], abs=1e-4)


class Bytes:
    """A tokenizer of one id a byte."""

    def decode(self, ids: list[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool = True) -> str:
        text = bytes(ids).decode()
        return text.replace(" ?", "?") if clean_up_tokenization_spaces else text

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}


def test_white_space_at_the_end_of_a_prompt_counts_to_the_option_as_in_lm_eval() -> None:
    for prompt, option in ((b"answer:\n", "B"), (b"answer:", " B"), (b"who ?", " B")):
        row = option_row(Bytes(), list(prompt), option)
        assert row.ids == tuple(prompt + option.encode()) and row.weights[-3:] == (0.0, 1.0, 1.0)


class Characters:
    """A tokenizer of one id a character, and one for both of "ab"."""

    def decode(self, ids: list[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        return "".join(map(chr, ids))

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [ord(one) for one in text.replace("ab", "c")]}


def test_an_option_that_is_merged_with_the_prompt_is_refused() -> None:
    with pytest.raises(DataError, match="the option 'b' adds no token to the prompt 'a'"):
        option_row(Characters(), [ord("a")], "b")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("reward: {name: exact}", r"not used with evaluation\.sets\.mine\.choices, which samples no completion"),
        ("samples: 2", "evaluation.sets.mine.samples: not used with"),
    ],
)
def test_options_of_written_answers_are_refused(more: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        compose_job(["+recipe=sft_demo", SET.replace("choices:", f"{more}, choices:")])


def test_a_question_without_options_or_with_another_answer_is_named(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "options": ["x", "y"], "answer": 2}, {"prompt": "b", "answer": "y"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows[0]) + "\n")
    words = [*TINY, "steps=1", "schedule=constant", SET]
    assert "the answer of 'a' is '2'; the text, the number" in command.run(*words, cwd=tmp_path, code=3)
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows[1]) + "\n")
    assert "has no list of two or more texts in its column options" in command.run(*words, cwd=tmp_path, code=3)
