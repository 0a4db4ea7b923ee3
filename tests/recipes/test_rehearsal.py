"""Every recipe for an accelerator runs on this machine with `rehearse` beside it: the same code on small things."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runner.cli.compose import compose_job
from runner.cli.main import main
from runner.paths import recipes_dir

RECIPES = sorted(path.stem for path in recipes_dir().glob("*_npu.yaml"))
SMALL = ["model.layers=1", "model.hidden_size=32", "tracker=none", "evaluation.max_new_tokens=4", "data.items=64"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_says_what_it_needs_expects_and_that_nobody_has_run_it(recipe: str, workdir: Path) -> None:
    lines = (recipes_dir() / f"{recipe}.yaml").read_text().splitlines()
    text = " ".join(line[2:] for line in lines[2:4])
    for words in ("One Ascend 910B (64 GB)", "device=cuda", "Expected: ", "Never run on hardware yet"):
        assert words in text
    assert f"run +recipe=[{recipe},rehearse]" in text
    spec, other = (compose_job([f"+recipe={recipe}", *words]).spec for words in ([], ["device=cuda"]))
    assert spec.device.name == "npu" and other.device.name == "cuda"
    first, second = (one.model_dump(exclude={"device"}) for one in (spec, other))
    assert first == second, "nothing but the device is another"


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_runs_here(recipe: str, workdir: Path) -> None:
    words = [f"+recipe=[{recipe},rehearse]", *SMALL, "data.held_out=4"]
    asked = compose_job(words).spec
    if asked.sampler.name != "none":
        words.append("sampler.max_new_tokens=4")
    assert main(words) == 0
    steps = [json.loads(line) for line in Path("outputs/latest/metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    assert list(Path("outputs/latest/export").glob("*.safetensors"))
