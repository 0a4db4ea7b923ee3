"""`run explain chat`: the first row token by token, and which tokens are trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runner.cli.main import main
from tests.data.conftest import chat

REWRITES = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ 'T' if loop.last and m.role == 'assistant' }}{{ m.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_row_is_shown_with_what_is_trained_on(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (workdir / "rows.jsonl").write_text(json.dumps({"messages": chat("q 1", "b", "c", "d")}))
    (workdir / "own.jinja").write_text(REWRITES)
    assert main(["explain", "chat", "data=file", "data.path=rows.jsonl", "chat.template=own.jinja"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("first row in the order of training (data=file, algorithm=sft): ") and lines[0].endswith(
        " 6 trained on"
    )
    assert [line for line in lines if line.startswith("trained")] == [
        "trained  T · b · <|im_end|>",
        "trained  T · d · <|im_end|>",
    ]
    assert {"shared beginning:", "turn 1:", "turn 2:"} <= set(lines)
    assert "q · ␣ · 1 · <|im_end|> · \\n" in "\n".join(lines)


def test_answers_of_a_pair_and_options_of_the_section(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "chat", "+recipe=dpo_demo"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"prompt:", "chosen:", "rejected:"} <= set(lines) and sum(line.startswith("trained") for line in lines) == 2
    assert main(["explain", "chat"]) == 0
    shown = capsys.readouterr().out
    assert "chat.train_on=assistant" in shown and "run explain chat +recipe=sft_demo" in shown


def test_the_places_of_an_image_have_no_text_of_their_own(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "chat", "+recipe=vision_demo"]) == 0
    shown = capsys.readouterr().out
    assert "<image> · <image>" in shown and "trained" in shown
