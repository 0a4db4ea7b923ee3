"""Every recipe for an accelerator runs on this machine with `rehearse` beside it: the same code on small things."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runner.cli.compose import compose_job
from runner.cli.main import main
from runner.paths import recipes_dir

RECIPES = sorted(path.stem for path in recipes_dir().glob("*_npu.yaml"))
REWARDED = ("grpo_npu", "ppo_npu")
SMALL = ["model.layers=1", "model.hidden_size=32", "tracker=none", "evaluation.max_new_tokens=4", "data.items=64"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_says_what_it_needs_expects_and_that_nobody_has_run_it(recipe: str, workdir: Path) -> None:
    lines = (recipes_dir() / f"{recipe}.yaml").read_text().splitlines()
    text = " ".join(line[2:] for line in lines[2:4])
    for words in ("One Ascend 910B (64 GB)", "device=cuda", "Expected: ", "Never run on hardware yet"):
        assert words in text
    assert f"run +recipe=[{recipe},rehearse]" + (" reward=rehearsal" if recipe in REWARDED else "") in text
    spec, other = (compose_job([f"+recipe={recipe}", *words]).spec for words in ([], ["device=cuda"]))
    assert spec.device.name == "npu" and other.device.name == "cuda"
    first, second = (one.model_dump(exclude={"device"}) for one in (spec, other))
    assert first == second, "nothing but the device is another"


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_runs_here(recipe: str, workdir: Path) -> None:
    rewarded = ["reward=rehearsal", "sampler.max_new_tokens=32"] if recipe in REWARDED else []
    assert main([f"+recipe=[{recipe},rehearse]", *SMALL, "data.held_out=4", *rewarded]) == 0
    steps = [json.loads(line) for line in Path("outputs/latest/metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    assert all(step["train/tokens"] > 0 and step["train/grad_norm"] > 0 for step in steps), "and it learns"
    assert list(Path("outputs/latest/export").glob("*.safetensors"))


def test_the_parts_can_be_chosen_one_by_one(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a rehearsal's reward nothing is right by chance, which is said."""
    chosen = "device=cpu model=tiny data=demo sampler=torch launch=local parallelism=single steps=2"
    fewer = ["evaluation.every=0", "data.held_out=4", "sampler.max_new_tokens=4", "algorithm.batch_size=2"]
    assert main(["+recipe=grpo_npu", *chosen.split(), *SMALL[:-2], *fewer]) == 0
    assert "so nothing was learnt" in capsys.readouterr().out
