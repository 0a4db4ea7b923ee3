"""`run parity` between the processor and the simulated NPU: they agree, and each wrong operator of the NPU is named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
pytestmark = pytest.mark.timeout(600)  # the first test builds the simulator
SMALL = (
    "model=tiny model.hidden_size=32 model.intermediate_size=32 model.layers=2 data=demo data.items=64 data.held_out=8 "
    "algorithm.batch_size=4 evaluation.every=0 checkpoint.best=null tracker=none schedule.warmup_steps=1"
)
ONE = "launch=local parallelism=single"
SAMPLED = "sampler=torch sampler.max_new_tokens=8"
RECIPES = {
    **dict.fromkeys(("sft_npu", "sft_full_npu", "cpt_npu", "dpo_npu", "rm_npu"), ""),
    "grpo_npu": f"{SAMPLED} reward=rehearsal",
    "ppo_npu": SAMPLED,
}
SFT = f"algorithm=sft {SMALL}"
WRONG = {  # the operator → where it is found
    "rms_norm": "policy/model.layers.1.post_attention_layernorm, whose output",
    "rotary": "the cause is what policy/model.layers.1.self_attn computes before it",
    "swiglu": "the cause is what policy/model.layers.1.mlp computes before it",
    "scale": "the cause is what policy/model.layers.0.self_attn computes before it",
    "polarity": "the cause is what policy/model.layers.0.self_attn computes before it",
    "no mask": "the cause is what policy/model.layers.0.self_attn computes before it",
}
TEACHER = (
    "from runner.cli.main import main\n"
    f"assert main({['+recipe=sft_demo', *SMALL.split(), 'steps=1', 'seed=9', 'device=cpu']}) == 0\n"
)


def compared(child: Any, folder: Path, *jobs: tuple[str, str]) -> list[str]:
    """What `run parity --compare` said of each job (operator, words), one after the other in one process."""
    return json.loads(child(HERE / "agreement.py", json.dumps(jobs), folder=folder).splitlines()[-1])


def assert_agrees(said: str) -> None:
    assert said.endswith("they agree\n\nexited with 0"), said
    assert re.search(r"device\.fused_ops\.rms_norm: \d+ modules", said) and "one side only" in said
    largest = re.search(r"outputs of step 1: \d+ compared, 0 beyond .*largest difference (\S+)", said)
    assert largest is not None and float(largest[1]) < 2e-5, "float32 on both sides, in another order"


@pytest.mark.slow
def test_the_simulated_npu_agrees_and_each_wrong_operator_is_named(child: Any, tmp_path: Path) -> None:
    right, *wrong = compared(child, tmp_path, ("right", SFT), *((what, SFT) for what in WRONG))
    assert_agrees(right)
    assert "2 modules ran on one side only" in right, "the two activations, which npu_swiglu contains"
    for (what, place), said in zip(WRONG.items(), wrong, strict=True):
        [line] = [line for line in said.splitlines() if "first in the forward pass" in line]
        assert said.endswith("exited with 5") and place in line, what


@pytest.mark.slow
def test_every_recipe_for_ascend_agrees(child: Any, tmp_path: Path) -> None:
    jobs = [("right", f"+recipe={name} {SMALL} {ONE} {more}".strip()) for name, more in RECIPES.items()]
    for (_, words), said in zip(jobs, compared(child, tmp_path, *jobs), strict=True):
        assert_agrees(said)
        assert "no recorded step had a gradient" not in said, words


@pytest.mark.slow
def test_what_learns_from_a_teacher_or_from_judged_answers_agrees(child: Any, tmp_path: Path) -> None:
    child(TEACHER, folder=tmp_path)
    teacher = f"algorithm.teacher={tmp_path}/outputs/latest/export"
    jobs = [f"algorithm=opd {teacher} {SAMPLED}", f"algorithm=distill {teacher}", "algorithm=kto"]
    for said in compared(child, tmp_path, *(("right", f"{words} {SMALL}") for words in jobs)):
        assert_agrees(said)
        assert "no recorded step had a gradient" not in said
