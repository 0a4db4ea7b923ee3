"""A run that learns nothing, because all rewards are equal, says so."""

from __future__ import annotations

import pytest

from runner.cli.main import main
from runner.interfaces import StepEnd
from runner.trainer.callbacks import AGAIN_AFTER, Contrast

NOTHING = {"reward/zero_variance": 1.0, "reward/mean": 0.125, "train/tokens": 0.0}
GRPO = (
    "+recipe=grpo_demo", "init_from=null", "tracker=none", "steps=1", "model.layers=1", "model.hidden_size=32",
    "data.items=16", "data.held_out=4", "algorithm.batch_size=2", "algorithm.group_size=2", "evaluation.every=0",
    "checkpoint.best=null", "sampler.max_new_tokens=2",
)  # fmt: skip


def warned(values: list[dict[str, float]], caplog: pytest.LogCaptureFixture) -> list[str]:
    callback = Contrast()
    for step, value in enumerate(values, 1):
        callback.on_step(StepEnd(step, value, last=False))
    return [record.getMessage() for record in caplog.records]


def test_the_first_step_without_contrast_is_warned_of_and_each_20th_after_it(caplog: pytest.LogCaptureFixture) -> None:
    said = warned([NOTHING] * (2 * AGAIN_AFTER), caplog)
    assert [line.split(":")[0] for line in said] == ["step 1", f"step {1 + AGAIN_AFTER}"]
    assert "all rewards were equal (mean 0.125), so nothing was learnt; look at samples.jsonl" in said[0]
    assert f"nothing was learnt, as at {AGAIN_AFTER} steps before;" in said[1]


@pytest.mark.parametrize("change", [{"train/tokens": 9.0}, {"reward/zero_variance": 0.875}], ids=str)
def test_a_step_that_learnt_is_not_warned_of(change: dict[str, float], caplog: pytest.LogCaptureFixture) -> None:
    assert warned([NOTHING | change, {"train/tokens": 0.0}], caplog) == []


@pytest.mark.parametrize("learns", [False, True])
def test_a_real_run_says_so_on_the_screen(learns: bool, workdir: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GRPO, f"algorithm.zero_variance={'keep' if learns else 'drop'}"]) == 0
    said = capsys.readouterr().out
    assert ("warning: step 1: in every group all rewards were equal (mean 0)" in said) is not learns
    assert "reward/zero_variance=1" in said
