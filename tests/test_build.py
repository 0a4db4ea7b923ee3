"""What `build` makes of a spec where the choice of one group changes another's part."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runner.build.parts import build_data, build_tokenizer
from runner.cli.compose import compose_job
from runner.decisions import Decisions


@pytest.mark.parametrize(("algorithm", "learnt"), [("sft", 7), ("cpt", 26)])
def test_continued_pre_training_learns_and_evaluates_every_token(algorithm: str, learnt: int, workdir: Path) -> None:
    Path("rows.jsonl").write_text(json.dumps({"prompt": "hello there, general", "completion": "kenobi"}) + "\n")
    words = ["data=file", "data.path=rows.jsonl", "data.eval_path=rows.jsonl", "data.cache=false", "model=tiny"]
    spec = compose_job([*words, f"algorithm={algorithm}"]).spec
    data = build_data(spec, build_tokenizer(spec), Decisions(strict=False))
    [item] = data.take(0, 1)
    [question] = data.held_out()
    assert len(item.ids) == 27, "26 bytes and the end of sequence"
    assert sum(item.weights) == sum(question.item.weights) == learnt
