"""Every recipe for an accelerator runs on this machine with `rehearse` beside it: the same code on small things."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runner.cli.job_builder import compose_job
from runner.cli.main import main
from runner.core.errors import SpecError
from runner.core.package import recipes_dir

RECIPES = sorted(path.stem for path in recipes_dir().glob("*_npu.yaml"))
BESIDE = {
    "grpo_npu": ["reward=rehearsal", "sampler=torch"],
    "ppo_npu": ["reward=rehearsal"],
}  # what a rehearsal needs, too
NUMBERS = {1: "One", 4: "Four", 8: "Eight"}
ONE = "launch=local parallelism=single"
SMALL = ["model.layers=1", "model.hidden_size=32", "tracker=none", "evaluation.max_new_tokens=4", "data.items=64"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_says_what_it_needs_expects_and_that_nobody_has_run_it(recipe: str, workdir: Path) -> None:
    spec, other = (compose_job([f"+recipe={recipe}", *words]).spec for words in ([], ["device=cuda"]))
    lines = (recipes_dir() / f"{recipe}.yaml").read_text().splitlines()
    text = " ".join(line[2:] for line in lines if line.startswith("#"))
    cards = f"{NUMBERS[spec.launch.devices + spec.launch.samplers]} Ascend 910B (64 GB)"
    for words in (cards, "device=cuda", "Expected: ", "Never run on hardware yet"):
        assert words in text
    assert " ".join([f"run +recipe=[{recipe},rehearse]", *BESIDE.get(recipe, [])]) in text
    assert (ONE in text) == (spec.launch.devices > 1)
    assert spec.device.name == "npu" and other.device.name == "cuda"
    first, second = (one.model_dump(exclude={"device"}) for one in (spec, other))
    assert first == second, "nothing but the device is another"


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_words_bring_it_to_one_card(recipe: str, workdir: Path) -> None:
    layout = compose_job([f"+recipe={recipe}"]).spec
    assert compose_job([f"+recipe={recipe}", *ONE.split()]).spec.launch.world == 1
    if layout.launch.world > 1:
        with pytest.raises(SpecError, match=r"set launch\.devices=1"):
            compose_job([f"+recipe={recipe}", "parallelism=single"])
        with pytest.raises(SpecError, match="type parallelism=single"):
            compose_job([f"+recipe={recipe}", "launch=local"])


def test_sft_npu_is_two_copies_of_two_pieces_and_sampling_has_whole_copies(workdir: Path) -> None:
    meshes = {name: compose_job([f"+recipe={name}"]).spec for name in RECIPES}
    said = {name: str(spec.parallelism.mesh(spec.launch.world)) for name, spec in meshes.items()}
    assert said.pop("sft_npu") == "dp_replicate=2 × dp_shard=2"
    assert said == dict.fromkeys(("cpt_npu", "sft_full_npu"), "one process") | dict.fromkeys(
        ("dpo_npu", "rm_npu"), "dp_replicate=4"
    ) | {"grpo_npu": "dp_replicate=6", "ppo_npu": "dp_replicate=8"}


def test_grpo_npu_has_six_that_train_and_two_on_which_an_engine_samples(workdir: Path) -> None:
    spec = compose_job(["+recipe=grpo_npu"]).spec
    assert (spec.launch.name, spec.launch.world, spec.launch.samplers, spec.sampler.name) == ("ray", 6, 2, "vllm")
    beside = compose_job(["+recipe=grpo_npu", *ONE.split()]).spec
    assert (beside.launch.world, beside.launch.samplers, beside.sampler.name) == (1, 0, "vllm")
    alone = compose_job(["+recipe=grpo_npu", "launch=local_8", "sampler=torch"]).spec
    assert (alone.launch.world, alone.launch.samplers, alone.sampler.name) == (8, 0, "torch")


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_runs_here(recipe: str, workdir: Path) -> None:
    short = ["sampler.max_new_tokens=32"] if recipe in BESIDE else []
    assert main([f"+recipe=[{recipe},rehearse]", *SMALL, "data.held_out=4", *BESIDE.get(recipe, []), *short]) == 0
    steps = [json.loads(line) for line in Path("outputs/latest/metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps][-2:] == [1, 2]
    assert all(step["train/tokens"] > 0 and step["train/grad_norm"] > 0 for step in steps[-2:]), "and it learns"
    assert list(Path("outputs/latest/export").glob("*.safetensors"))


def test_the_parts_can_be_chosen_one_by_one(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a rehearsal's reward nothing is right by chance, which is said."""
    chosen = "device=cpu model=tiny data=demo sampler=torch launch=local parallelism=single steps=2"
    fewer = ["evaluation.every=0", "data.held_out=4", "sampler.max_new_tokens=4", "algorithm.batch_size=2"]
    assert main(["+recipe=grpo_npu", *chosen.split(), *SMALL[:-2], *fewer]) == 0
    assert "so nothing was trained" in capsys.readouterr().out


@pytest.mark.slow
def test_grpo_npu_is_rehearsed_at_two_and_one_placed_by_ray(workdir: Path) -> None:
    pytest.importorskip("ray")
    layout = "launch=ray launch.devices=2 launch.samplers=1 parallelism=ddp sampler.max_new_tokens=16"
    words = ["+recipe=[grpo_npu,rehearse]", *BESIDE["grpo_npu"], *layout.split()]
    assert main([*words, *SMALL, "evaluation.every=0", "device.threads=1"]) == 0
    steps = [json.loads(line) for line in Path("outputs/latest/metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    assert all(step["weight_sync/logprob_error"] < 1e-3 and step["train/grad_norm"] > 0 for step in steps)
