"""The demo of images learns from pixels: with the images of questions exchanged, its answers are those of chance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runner.core.media import MEDIA_ID
from runner.data.chat import Renderer
from runner.data.demo_shapes import NUM_ANSWERS, answer, draw
from runner.inference.model_source import load_source, parse_source
from tests.command import run
from tests.model.zoo import greedy


def share_right(model: Any, prompts: list[list[int]], wanted: list[str]) -> float:
    answers = [model.tokenizer.decode(ids) for ids in greedy(model, prompts, 16)]
    return sum(a == b for a, b in zip(answers, wanted, strict=True)) / len(wanted)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_counts_and_names_what_the_pixels_show(tmp_path: Path) -> None:
    printed = run("+recipe=vision_demo", "evaluation.every=0", "tracker=none", cwd=tmp_path, timeout_s=600)
    assert 'run infer latest --image FILE "which shapes?"' in printed
    export = tmp_path / "outputs" / "latest" / "export"
    loaded = load_source(parse_source(str(export)))
    reader, numbers = loaded.tokenizer.image_reader, list(range(10**6, 10**6 + 96))
    ids = [reader.add(draw(number), several=False)[0].id for number in numbers]
    parts = [{"type": "image", "image": draw(0)}, {"type": "text", "text": "which shapes?"}]
    question = [{"role": "user", "content": parts}]
    renderer = Renderer(loaded.tokenizer)
    prompt = renderer.control.ids_of(renderer.render_prompt(question))
    prompts = [[one if token >= MEDIA_ID else token for token in prompt] for one in ids]
    wanted = [answer(number) for number in numbers]
    assert share_right(loaded.model, prompts, wanted) >= 0.9
    exchanged = [*prompts[7:], *prompts[:7]]
    assert share_right(loaded.model, exchanged, wanted) <= 1 / NUM_ANSWERS + 0.1
    (tmp_path / "a.png").write_bytes(draw(numbers[0]))
    assert wanted[0] in run("infer", "latest", "--image", "a.png", "which shapes?", cwd=tmp_path)
    assert "the same greedy tokens" in run("export", "latest", "--check", cwd=tmp_path)
