"""A run that learns nothing, because all rewards are equal, says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runner.cli.main import main
from runner.interfaces import StepResult
from runner.trainer.callbacks import WARN_EVERY, ZeroVarianceWarning

NOTHING = {"reward/zero_variance": 1.0, "reward/mean": 0.125, "train/tokens": 0.0}
GRPO = (
    "+recipe=grpo_demo", "init_from=null", "tracker=none", "steps=1", "model.layers=1", "model.hidden_size=32",
    "data.items=16", "data.held_out=4", "algorithm.batch_size=2", "algorithm.group_size=2", "evaluation.every=0",
    "checkpoint.best=null", "sampler.max_new_tokens=2",
)  # fmt: skip


def warned(values: list[dict[str, float]], caplog: pytest.LogCaptureFixture) -> list[str]:
    callback = ZeroVarianceWarning()
    for step, value in enumerate(values, 1):
        callback.on_step(StepResult(step, value, last=False))
    return [record.getMessage() for record in caplog.records]


def test_the_first_step_without_contrast_is_warned_of_and_each_20th_after_it(caplog: pytest.LogCaptureFixture) -> None:
    said = warned([NOTHING] * (2 * WARN_EVERY), caplog)
    assert [line.split(":")[0] for line in said] == ["step 1", f"step {1 + WARN_EVERY}"]
    assert "all rewards were equal (mean 0.125), so nothing was trained; check samples.jsonl" in said[0]
    assert f"nothing was trained, as in {WARN_EVERY} steps before;" in said[1]


def test_a_step_whose_completions_are_all_left_out_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    [said] = warned([NOTHING | {"reward/zero_variance": 0.25, "rollout/truncated_frac": 1.0}], caplog)
    assert "100% of the completions were truncated and left out, so nothing was trained; raise sampler.max" in said


@pytest.mark.parametrize("change", [{"train/tokens": 9.0}, {"train/tokens": 9.0, "reward/zero_variance": 0.8}], ids=str)
def test_a_step_that_learnt_is_not_warned_of(change: dict[str, float], caplog: pytest.LogCaptureFixture) -> None:
    assert warned([NOTHING | change, {"train/tokens": 0.0}], caplog) == []


@pytest.mark.parametrize("learns", [False, True])
def test_a_real_run_says_so_on_the_screen(learns: bool, workdir: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GRPO, f"algorithm.zero_variance={'keep' if learns else 'drop'}"]) == 0
    said = capsys.readouterr().out
    assert ("warning: step 1: in every group all rewards were equal (mean 0)" in said) is not learns
    header = next(line for line in said.splitlines() if "equal" in line.split())
    assert "reward" in header.split()


def test_a_run_without_any_valid_reward_says_so_in_its_own_words_and_ends_with_3(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.py").write_text("def score(completions): return [None] * len(completions)")
    words = [word for word in GRPO if word != "steps=1"]
    more = ["steps=9", "reward=function", "reward.path=mine.py:score", "reward.max_failures=4"]
    assert main([*words, *more]) == 3
    printed = "".join(capsys.readouterr())
    assert "step 1: no group had a valid reward (4 samples), so nothing was trained" in printed
    assert "no sample of 4 groups in a row could be scored" in printed and "rewards were equal" not in printed
    [row] = [json.loads(line) for line in Path("outputs/latest/metrics.jsonl").read_text().splitlines()]
    assert row["reward/num_failed"] == 4 and None not in row.values() and "NaN" not in map(str, row.values())
    assert not {"reward/mean", "reward/std", "reward/zero_variance"} & set(row)
