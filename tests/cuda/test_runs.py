"""Whole runs on a GPU, as a user starts them: memory against the plan, kill and resume, the demos."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runner.cli.main import main
from tests.faults.test_kill_resume import Run, assert_same, killed_run
from tests.recipes.test_demos_learn import DEMOS, in_the_end, ran

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(300)]

PLANNED = (
    "+recipe=sft_demo",
    "device=cuda",
    "data=file",
    "data.max_length=1024",
    "algorithm.batch_size=32",
    "algorithm.micro_batch_tokens=8192",
    "model.hidden_size=1024",
    "model.intermediate_size=3072",
    "model.layers=12",
    "model.heads=16",
    "model.kv_heads=8",
    "model.vocab_size=32768",
    "steps=3",
    "schedule.warmup_steps=1",
    "checkpoint.every=0",
    "checkpoint.export=false",
    "checkpoint.best=null",
    "evaluation.every=0",
)
CASES = {
    "full": (),
    "recomputing": ("model.gradient_checkpointing=true",),
    "LoRA": ("adapter=lora", "model.dtype=bfloat16"),
}
WITHIN = 0.15  # of the tensors planned; cuBLAS and the allocator's rounding are not in the plan


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of text whose rows all have 1017 tokens."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"{n:7d} " * 127}) + "\n" for n in range(128)))
    return f"data.path={path}"


@pytest.mark.parametrize("case", CASES)
def test_a_run_takes_the_memory_that_was_planned(
    case: str, rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*PLANNED, *CASES[case], rows]
    counted = ran(words, tmp_path)[-1]["perf/peak_memory_bytes"]
    assert main(["plan", *words, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    with capsys.disabled():
        print(f"\n{case}: planned {plan['peak_bytes'] / 2**20:,.0f} MiB, counted {counted / 2**20:,.0f} MiB")
    assert abs(plan["peak_bytes"] / counted - 1) <= WITHIN
    assert counted <= plan["band_bytes"][1]


@pytest.mark.parametrize("job", ["full", "grpo"])
def test_a_deterministic_run_that_was_killed_ends_as_one_that_was_not(job: str, tmp_path: Path) -> None:
    peaceful, killed = Run(tmp_path / "peaceful", 24, job), Run(tmp_path / "killed", 24, job)
    for run in (peaceful, killed):
        run.job = (*run.job, "device=cuda", "device.deterministic=true")
    assert peaceful.start(*peaceful.job).wait(timeout=120) == 0, peaceful.printed.read_text()
    killed_run(killed, kills=2, seed=0)
    assert_same(killed, peaceful)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all demos run: grpo_demo and dpo_demo begin with the same short supervised start, which is made once."""
    return tmp_path_factory.mktemp("demos")


@pytest.mark.parametrize("demo", ["sft_demo", "dpo_demo", "grpo_demo"])
def test_a_demo_learns(demo: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ran([f"+recipe={demo}", "device=cuda"], folder)
    claim, last = DEMOS[demo], in_the_end(lines, DEMOS[demo].result)
    with capsys.disabled():
        print(f"\n{demo}: {claim.result} {last:.3f}")
    assert claim.low <= lines[0][claim.metric] <= claim.high and last >= claim.least
