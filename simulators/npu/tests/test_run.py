"""`run` on the simulated NPU: recipes for Ascend at toy size with the CPU's numbers, resuming, memory that runs out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.timeout(600)  # the first test builds the simulator
PROGRAM = (
    "import json, sys; from runner.cli.main import main; print([main(words) for words in json.loads(sys.argv[1])])"
)
SMALL = (
    "model=tiny",
    "model.dtype=float32",  # as the processor computes, with which it is compared
    "model.hidden_size=32",
    "model.intermediate_size=32",
    "model.layers=2",
    "data=demo",
    "data.items=64",
    "data.held_out=8",
    "algorithm.batch_size=4",
    "evaluation.every=0",
    "checkpoint.best=null",
    "checkpoint.export=false",
    "tracker=none",
    "schedule.warmup_steps=1",
)
EXPORTED = tuple(word for word in SMALL if word != "checkpoint.export=false")
WEIGHTS = "policy.safetensors"
SAMPLED = ("sampler=torch", "sampler.max_new_tokens=12")
ONE = ("launch=local", "parallelism=single")
REHEARSED = ("sampler=torch", *ONE)


def jobs(child: Any, folder: Path, *commands: tuple[str, ...]) -> list[Path]:
    """Run the commands one after the other in one process, each well; the run folders, by the names of the jobs."""
    folder.mkdir(exist_ok=True)
    said = child(PROGRAM, json.dumps(commands), folder=folder)
    assert said.splitlines()[-1] == str([0] * len(commands)), said
    found = {path.parent for path in folder.glob("outputs/*/*/spec.yaml") if not path.parent.is_symlink()}
    return sorted(found, key=lambda path: yaml.safe_load((path / "spec.yaml").read_text())["name"])


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def curves(folder: Path) -> list[dict[str, float]]:
    """What was trained on in each step, without times and memory."""
    kept = ("train/", "reward/", "critic/", "eval/")
    return [{name: value for name, value in line.items() if name.startswith(kept)} for line in lines(folder)]


def assert_close(one: Path, two: Path) -> None:
    assert len(lines(one)) == len(lines(two)) > 0
    for a, b in zip(curves(one), curves(two), strict=True):
        assert a.keys() == b.keys() and any("loss" in name for name in a)
        assert {name: (a[name], b[name]) for name in a if a[name] != pytest.approx(b[name], rel=1e-5, abs=1e-5)} == {}


def test_sft_gives_the_processors_curve_and_resumes_to_the_bit(child: Any, tmp_path: Path) -> None:
    sft = ("+recipe=sft_demo", *SMALL, "schedule=constant", "checkpoint.every=2")
    card = ("device=npu_sim", "device.memory_gib=8", "device.deterministic=true")
    cpu, cut, whole = jobs(
        child,
        tmp_path,
        (*sft, *card, "name=whole", "steps=4", "checkpoint.asynchronous=true"),
        (*sft, *card, "name=cut", "steps=2"),
        ("resume", "latest", "steps=4"),
        (*sft, "device=cpu", "name=cpu", "steps=4"),
    )
    assert_close(whole, cpu)
    assert curves(whole) == curves(cut), "bit for bit"
    for step in ("step-00000002", "step-00000004"):  # the first one of `whole` was written while it trained on
        assert (whole / "checkpoints" / step / WEIGHTS).read_bytes() == (
            cut / "checkpoints" / step / WEIGHTS
        ).read_bytes()
    said = json.loads((whole / "manifest.json").read_text())
    assert said["device"]["name"] == "npu_sim" and said["environment"]["HCCL_DETERMINISTIC"] == "strict"
    facts = {fact["feature"] for fact in said["facts"]}
    assert {"device.fused_ops.rms_norm", "device.fused_ops.rotary", "device.fused_ops.swiglu", "attention"} <= facts
    peaks = [line["perf/peak_memory_bytes"] for line in lines(whole)]
    assert all(1e6 < peak < 100e6 for peak in peaks), "what tensors held on the card, not this process's memory"


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["vision_demo", "vision_grpo_demo"])
def test_images_give_the_processors_curve(child: Any, tmp_path: Path, recipe: str) -> None:
    keep = [word for word in SMALL if word.startswith(("model.", "data.", "evaluation", "checkpoint", "tracker"))]
    words = (f"+recipe={recipe}", *keep, "algorithm.batch_size=4", "steps=2", "init_from=null")
    words += ("sampler.max_new_tokens=8",) if "grpo" in recipe else ("schedule.warmup_steps=1",)
    card = ("device=npu_sim", "device.memory_gib=8", "name=sim")
    cpu, sim = jobs(child, tmp_path, (*words, *card), (*words, "device=cpu", "name=cpu"))
    assert_close(sim, cpu)
    decided = json.loads((sim / "manifest.json").read_text())["decisions"]
    [reason] = [one["reason"] for one in decided if one["feature"] == "device.fused_ops"]
    assert "is none of qwen2, qwen3" in reason, "the tower and rotary positions of images use plain operators"


@pytest.mark.slow
def test_grpo_npu_can_be_rehearsed(child: Any, tmp_path: Path) -> None:
    grpo = ("+recipe=grpo_npu", *SMALL, *SAMPLED, *ONE, "steps=2", "optimizer.lr=0.01")
    cpu, sim = jobs(child, tmp_path, (*grpo, "device=npu_sim", "name=sim"), (*grpo, "device=cpu", "name=cpu"))
    assert json.loads((sim / "manifest.json").read_text())["device"]["name"] == "npu_sim"
    assert_close(sim, cpu)


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallelism", ["ddp", "fsdp", "tp", "pp", "cp", "cp parallelism.cp_backend=ring", "fsdp parallelism.cp=2"]
)
def test_a_job_on_two_cards_gives_the_processors_curve(child: Any, tmp_path: Path, parallelism: str) -> None:
    words = ("+recipe=sft_npu", *SMALL, "steps=2")
    cards = ("device=npu_sim", "device.cards=2", "launch.devices=2", *f"parallelism={parallelism}".split())
    cpu, sim = jobs(child, tmp_path, (*words, *cards, "name=sim"), (*words, *ONE, "device=cpu", "name=cpu"))
    assert_close(sim, cpu)
    said = json.loads((sim / "manifest.json").read_text())
    [environment] = [fact for fact in said["facts"] if fact["feature"] == "environment"]
    assert "HCCL_IF_BASE_PORT=" in environment["reason"] and "too late" not in environment["reason"]
    assert [rank["local_rank"] for rank in said["ranks"]] == [0, 1]


@pytest.mark.slow
def test_experts_on_two_cards_give_the_processors_curve(child: Any, tmp_path: Path) -> None:
    """What travels is float32, the one type that HCCL documents all-to-all for; the card's own operator computes."""
    small = [word for word in SMALL if word != "model=tiny"]
    words = ("+recipe=sft_npu", "model=tiny_moe", *small, "steps=2", "adapter=none")
    cards = ("device=npu_sim", "device.cards=2", "launch.devices=2", "parallelism=ep")
    cpu, sim = jobs(child, tmp_path, (*words, *cards, "name=sim"), (*words, *ONE, "device=cpu", "name=cpu"))
    assert_close(sim, cpu)
    facts = {fact["feature"] for fact in json.loads((sim / "manifest.json").read_text())["facts"]}
    assert {"device.fused_ops.grouped_matmul", "parallelism.ep"} <= facts


@pytest.mark.slow
def test_sft_npu_on_its_four_cards_gives_the_processors_curve(child: Any, tmp_path: Path) -> None:
    """As the recipe says it: two copies in two pieces each."""
    words = ("+recipe=sft_npu", *SMALL, "steps=2")
    cards = ("device=npu_sim", "device.cards=4")
    cpu, sim = jobs(child, tmp_path, (*words, *cards, "name=sim"), (*words, *ONE, "device=cpu", "name=cpu"))
    assert_close(sim, cpu)
    said = json.loads((sim / "manifest.json").read_text())
    assert [rank["local_rank"] for rank in said["ranks"]] == [0, 1, 2, 3]
    spec = yaml.safe_load((sim / "spec.yaml").read_text())
    assert (spec["parallelism"]["name"], spec["parallelism"]["dp_replicate"]) == ("hsdp", 2)


@pytest.mark.slow
def test_torchrun_may_start_the_ranks_whose_environment_is_set_before_torch(child: Any, tmp_path: Path) -> None:
    start = "import sys; from torch.distributed.run import main; main(sys.argv[1:])"
    words = ("+recipe=sft_npu", *SMALL, "steps=1", "device=npu_sim", "device.cards=2", "parallelism=ddp")
    child(start, "--standalone", "--nproc_per_node=2", "-m", "runner", *words, folder=tmp_path)
    said = json.loads((tmp_path / "outputs" / "latest" / "manifest.json").read_text())
    [environment] = [fact for fact in said["facts"] if fact["feature"] == "environment"]
    assert "too late" not in environment["reason"] and len(said["ranks"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["dpo_npu", "ppo_npu", "rm_npu", "cpt_npu", "sft_npu", "sft_full_npu"])
def test_the_other_recipes_for_ascend_give_the_processors_curve(child: Any, tmp_path: Path, recipe: str) -> None:
    words = (f"+recipe={recipe}", *SMALL, *ONE, "steps=2", *(SAMPLED if recipe == "ppo_npu" else ()))
    cpu, sim = jobs(child, tmp_path, (*words, "device=npu_sim", "name=sim"), (*words, "device=cpu", "name=cpu"))
    assert_close(sim, cpu)


@pytest.mark.slow
def test_what_has_a_teacher_and_kto_give_the_processors_curve(child: Any, tmp_path: Path) -> None:
    jobs(child, tmp_path / "teacher", ("+recipe=sft_demo", *EXPORTED, "steps=1", "seed=9", "device=cpu"))
    teacher = f"algorithm.teacher={tmp_path}/teacher/outputs/latest/export"
    words = {"distill": (teacher,), "kto": (), "opd": (teacher, *SAMPLED)}
    commands = [
        (f"algorithm={name}", *more, *SMALL, "steps=2", f"device={device}", f"name={name}_{device}")
        for device in ("npu_sim", "cpu")
        for name, more in words.items()
    ]
    found = {folder.name.split("-")[1]: folder for folder in jobs(child, tmp_path, *commands)}
    for name in words:
        assert_close(found[f"{name}_npu_sim"], found[f"{name}_cpu"])


@pytest.mark.slow
def test_a_trained_reward_model_has_the_cards_operators(child: Any, tmp_path: Path) -> None:
    jobs(child, tmp_path / "judge", ("algorithm=rm", *EXPORTED, "steps=1", "device=cpu"))
    grpo = ("algorithm=grpo", *SMALL, *SAMPLED, "reward=model", f"reward.path={tmp_path}/judge/outputs/latest/export")
    cpu, sim = jobs(child, tmp_path, *((*grpo, "steps=2", f"device={d}", f"name={d}") for d in ("npu_sim", "cpu")))
    assert_close(sim, cpu)
    facts = json.loads((sim / "manifest.json").read_text())["facts"]
    assert len([fact for fact in facts if fact["feature"] == "device.fused_ops.rms_norm"]) >= 1
    assert any(line["reward/mean"] for line in lines(sim)), "the model of random weights has an opinion"


@pytest.mark.slow
def test_bfloat16_on_a_card_that_has_none_is_refused(child: Any, tmp_path: Path) -> None:
    program = "import sys; from runner.cli.main import main; sys.exit(main(sys.argv[1:]))"
    words = (
        "+recipe=sft_demo",
        *SMALL,
        "device=npu_sim",
        "device.soc=Ascend910A",
        "model.dtype=bfloat16",
        "steps=1",
    )
    said = child(program, *words, folder=tmp_path, code=2)
    assert "model.dtype: an Ascend910A has no bfloat16; type model.dtype=float32" in said


@pytest.mark.slow
def test_the_documented_rehearsal_runs_as_it_stands(child: Any, tmp_path: Path) -> None:
    documented = ("+recipe=grpo_npu", "device=npu_sim", "model=tiny", "data=demo", *REHEARSED, "steps=2")
    [folder] = jobs(child, tmp_path, documented)
    assert json.loads((folder / "manifest.json").read_text())["device"]["name"] == "npu_sim"
    assert len(lines(folder)) == 2


@pytest.mark.slow
def test_memory_that_runs_out_ends_with_its_own_code_and_advice(child: Any, tmp_path: Path) -> None:
    words = (
        "+recipe=sft_demo",
        "tracker=none",
        "evaluation.every=0",
        "checkpoint.best=null",
        "data.items=64",
        "steps=1",
    )
    program = "import sys; from runner.cli.main import main; sys.exit(main(sys.argv[1:]))"
    card = ("device=npu_sim", "device.memory_gib=0.03")
    said = child(program, *words, *card, folder=tmp_path, code=75)
    assert "NPU out of memory" in said and "algorithm.micro_batch_tokens" in said


@pytest.mark.slow
def test_a_list_of_visible_cards_hides_some_and_one_with_a_wrong_number_ends_the_job(
    child: Any, tmp_path: Path
) -> None:
    count = "from npu_simulator.config import NpuSimConfig; NpuSimConfig(cards=4).enter(); import torch; "
    assert child(count + "print(torch.npu.device_count())", ASCEND_RT_VISIBLE_DEVICES="1,3").split()[-1] == "2"
    program = "import sys; from runner.cli.main import main; sys.exit(main(sys.argv[1:]))"
    words = ("+recipe=sft_demo", *SMALL, "device=npu_sim", "device.cards=4", "steps=1")
    said = child(program, *words, folder=tmp_path, code=2, ASCEND_RT_VISIBLE_DEVICES="1,4")
    assert "ASCEND_RT_VISIBLE_DEVICES=1,4 lists 2 devices, but the driver shows 1" in said
    said = child(program, *words, folder=tmp_path, code=2, ASCEND_RT_VISIBLE_DEVICES="7")
    assert "ASCEND_RT_VISIBLE_DEVICES=7 lists 1 device, but the driver shows 0" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variable", "value", "why"),
    [
        ("ASCEND_RT_VISIBLE_DEVICES", "", "No NPUs are available"),
        ("PYTORCH_NPU_ALLOC_CONF", "foo:1", "Unrecognized key 'foo'"),
    ],
)
def test_what_torch_npu_refuses_of_a_shell_is_the_shells_fault(
    variable: str, value: str, why: str, child: Any, tmp_path: Path
) -> None:
    program = "import sys; from runner.cli.main import main; sys.exit(main(sys.argv[1:]))"
    words = ("+recipe=sft_demo", *SMALL, "device=npu_sim", "steps=1")
    said = child(program, *words, folder=tmp_path, code=2, **{variable: value})
    assert f"device=npu_sim: {why}" in said and "find the cause: run doctor device=npu" in said
