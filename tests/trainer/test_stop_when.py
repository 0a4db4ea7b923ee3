"""Early stopping: when it ends a run, what the run then says, and which jobs cannot have it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from runner.cli.job_builder import compose_job
from runner.core.auto_choices import Decisions
from runner.core.errors import SpecError
from runner.interfaces import StepResult
from runner.testing import check_callback
from runner.trainer.callbacks import BaseCallback, LogStep, StopWhen
from runner.trainer.config import StopWhenConfig
from runner.trainer.loop import run_loop
from tests import command
from tests.small import JUDGED
from tests.trainer.test_loop import job

NAN = float("nan")


class Give(BaseCallback):
    """Gives the metric the values that are listed, None = not measured."""

    def __init__(self, values: list[float | None], metric: str) -> None:
        self._values, self._metric = values, metric

    def on_step(self, end: StepResult) -> None:
        if (value := self._values[end.step - 1]) is not None:
            end.values[self._metric] = value


@pytest.mark.parametrize(
    ("values", "options", "last"),
    [
        ([3, 2, 1, 0.5, 0.4, 0.3], {"patience": 2}, 6),
        ([3, 4, 5, 0, 0, 0], {"patience": 2}, 3),
        ([3, None, 4, None, 5, 0], {"patience": 2}, 5),
        ([3, NAN, 2, NAN, NAN, 0], {"patience": 2}, 5),
        ([NAN, NAN, 2, 1, 0, 0], {"patience": 2}, 2),
        ([3, 2.9, 2.8, 2.7, 0, 0], {"patience": 3, "min_delta": 0.5}, 4),
        ([3, 2, 1, 0, 0, 0], {"stopping_threshold": 1.0}, 3),
        ([3, 2, 1, 0, 0, 0], {"stopping_threshold": 3.0, "mode": "max"}, 1),
    ],
)
def test_the_step_that_ends_the_run_is_its_last_one_and_is_recorded(
    values: list[float | None], options: dict[str, object], last: int
) -> None:
    decide, seen = Decisions(strict=True), list[tuple[int, bool]]()
    config = StopWhenConfig.model_validate({"metric": "eval/loss", **options})
    ended = BaseCallback()
    ended.on_step = lambda end: seen.append((end.step, end.last))  # type: ignore[method-assign]
    stop = StopWhen(config, decide=decide, say=print)
    assert run_loop(job([Give(values, "eval/loss"), stop, LogStep([]), ended]), 0) == last
    assert seen[-1] == (last, True) and all(not over for _, over in seen[:-1])
    assert [fact["value"] for fact in decide.records()["facts"]] == ([] if last == 6 else [f"after step {last}"])


def test_its_state_survives_a_resume_and_patience_begins_again_after_it_ended_a_run() -> None:
    config = StopWhenConfig(metric="eval/loss", patience=3)
    stopped = check_callback(config, steps=4, values={"eval/loss": 1.0}).state_dict()
    said: list[str] = []
    again = StopWhen(StopWhenConfig(metric="eval/loss", patience=2), decide=Decisions(), say=said.append)
    again.load_state_dict(stopped)
    again.on_start(4)
    assert "best at step 1 (1); 3 measurements without improvement since" in said[0] and "again after step 4" in said[0]
    assert again.state_dict() == stopped | {"without": 0}
    again.load_state_dict(
        {name: value for name, value in stopped.items() if name not in ("metric", "sign", "ended_early")}
    )


def test_a_resume_with_another_metric_begins_again_and_says_so() -> None:
    stopped = check_callback(StopWhenConfig(metric="eval/accuracy"), steps=2, values={"eval/accuracy": 0.9})
    for config in (StopWhenConfig(metric="eval/loss"), StopWhenConfig(metric="eval/accuracy", mode="min")):
        said = list[str]()
        again = StopWhen(config, decide=Decisions(), say=said.append)
        first = again.state_dict()
        again.load_state_dict(stopped.state_dict())
        assert again.state_dict() == first
        assert "the checkpoint compares eval/accuracy (max)" in said[0] and f"; {config.metric} is compared" in said[0]


def test_patience_that_ends_at_the_planned_last_step_ended_nothing_early() -> None:
    config, said = StopWhenConfig(metric="eval/loss", patience=2), list[str]()
    stop = StopWhen(config, decide=Decisions(), say=said.append)
    assert run_loop(job([Give([4, 3, 2, 1, 2, 3], "eval/loss"), stop]), 0) == 6
    again = StopWhen(config, decide=Decisions(), say=said.append)
    again.load_state_dict(stop.state_dict())
    again.on_start(6)
    [line] = said
    assert "stopped early" not in line and line.startswith("callbacks.stop_when: eval/loss was best at step 4 (1)")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["metric=eval/loss"], "never ends the run; give callbacks.stop_when.patience=3"),
        (["metric=eval/los", "patience=2"], "unknown metric; did you mean eval/loss?"),
        (["metric=eval/pass@4", "patience=2"], "pass@4 is not measured with evaluation.samples=0"),
        (["metric=eval/reward/mean", "patience=2"], "needs a reward, and this job has none"),
        (["metric=eval/hard/pass@2", "patience=2"], "no evaluation set is named hard"),
        (["metric=perf/mfu", "patience=2", "mode=max"], "each rank measures its own perf/mfu"),
        (["metric=train/lr", "patience=2"], "train/lr has no known direction"),
        (["metric=eval/loss", "stopping_threshold=1", "min_delta=1"], "is for callbacks.stop_when.patience"),
        (["metric=eval/loss", "patience=2", "evaluation.every=0"], "evaluation.every=0 disables evaluation"),
        (["metric=eval/loss", "patience=2", "data=file", "data.path=a.jsonl"], "has no held-out rows"),
    ],
)
def test_a_job_that_cannot_have_the_metric_is_refused_before_it_starts(words: list[str], message: str) -> None:
    own = [f"callbacks.stop_when.{w}" if w.partition("=")[0] in StopWhenConfig.model_fields else w for w in words]
    with pytest.raises(SpecError, match=re.escape(message)):
        compose_job(["+recipe=sft_demo", "checkpoint.best=null", "callbacks=stop_when", *own])


@pytest.mark.parametrize(
    "words",
    [
        ["+recipe=tool_demo", "checkpoint.best=eval/loss"],
        ["+recipe=grpo_demo", "checkpoint.best=eval/x/loss", "evaluation.sets={x: {environment: {name: calculator}}}"],
    ],
)
def test_an_episode_has_no_loss(words: list[str]) -> None:
    with pytest.raises(SpecError, match=r"loss is not measured with environment=calculator"):
        compose_job(words)


@pytest.mark.parametrize("name", ["[1]", "{a: 1}", "3"])
def test_the_name_of_a_sets_component_is_a_text(name: str) -> None:
    with pytest.raises(SpecError, match=r"evaluation\.sets\.x\.data\.name: no data named"):
        compose_job(["+recipe=grpo_demo", f"evaluation.sets={{x: {{data: {{name: {name}}}}}}}"])
    with pytest.raises(SpecError, match=r"reward\.parts\[0\]\.name: no reward named"):
        compose_job(["+recipe=grpo_demo", "reward=sum", f"reward.parts=[{{name: {name}}}]"])


def test_metrics_of_answers_and_of_sets_are_taken() -> None:
    words = ["+recipe=grpo_demo", "callbacks=stop_when", "callbacks.stop_when.patience=2"]
    sets = "evaluation.sets={hard: {data: {name: demo, digits: 6}, samples: 2}}"
    for metric in ("eval/reward/mean", "eval/pass@4", "eval/exact_match", "eval/hard/mean@2", "reward/mean"):
        compose_job([*words, sets, f"callbacks.stop_when.metric={metric}"])


def test_a_run_that_ends_early_is_done_says_why_and_can_be_continued(tmp_path: Path) -> None:
    own = ["callbacks=stop_when", "callbacks.stop_when.metric=eval/loss", "callbacks.stop_when.stopping_threshold=99"]
    out = command.run(*JUDGED, *own, "evaluation.at_start=false", cwd=tmp_path)
    assert "stopped early: after step 3 (eval/loss is" in out and "done      3 steps" in out
    run = (tmp_path / "outputs/latest").resolve()
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("done", 0) and "after step 3" in status["stopped_early"]
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]
    assert (run / "checkpoints/step-00000003").is_dir() and (run / "export").is_dir()
    assert "ended     stopped early after step 3" in command.run("status", "latest", cwd=tmp_path)
    again = command.run("resume", "latest", cwd=tmp_path)
    assert "stopped early after step 3: eval/loss is" in again and "'callbacks=[]'" in again
    assert "done      6 steps" in command.run("resume", "latest", "callbacks=[]", cwd=tmp_path)
    assert "stopped_early" not in json.loads((run / "status.json").read_text())
