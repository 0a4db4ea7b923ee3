"""Which overrides a resume accepts, and what an attempt keeps of the one before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runner.cli.job_builder import compose_job
from runner.core.errors import DeadlineExceeded, SpecError
from runner.data.config import today
from runner.launch.local import check_spec, next_attempt, read_status, refuse_other_job, resume, write_spec
from runner.launch.run_messages import changed_evaluation_note, longer_schedule_note
from runner.run_dir.folder import RunFolder
from runner.run_dir.manifest import check_spec_unchanged, immutable_fields
from runner.schedule.config import CosineConfig, cosine
from runner.spec.job import JobSpec
from tests import command
from tests.ports import free_port
from tests.small import TINY


def spec(*words: str, steps: int = 10) -> JobSpec:
    return compose_job(["+recipe=sft_demo", f"steps={steps}", *words]).spec


def test_more_steps_and_other_watching_are_fine() -> None:
    refuse_other_job(spec(), spec("evaluation.every=7", "tracker=tensorboard", steps=20))


def test_what_a_fault_of_a_sampler_says_to_type_is_fine() -> None:
    began = compose_job(["+recipe=grpo_demo", "launch.samplers=1"]).spec
    longer = compose_job(
        ["+recipe=grpo_demo", "launch.samplers=1", "sampler.timeout_s=9", "sampler.sync_logprob_tolerance=0.1"]
    ).spec
    refuse_other_job(began, longer)
    check_spec_unchanged(longer, {"spec": immutable_fields(began)})
    with pytest.raises(SpecError, match="sampler: cannot change in a resumed run"):
        refuse_other_job(began, compose_job(["+recipe=grpo_demo", "launch.samplers=1", "sampler.top_p=0.5"]).spec)


def test_what_the_curve_depends_on_is_refused_all_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        refuse_other_job(spec(), spec("seed=1", "optimizer=sgd", "optimizer.lr=0.1"))
    assert [p.key for p in caught.value.problems] == ["seed", "optimizer"]


def test_fewer_steps_are_refused() -> None:
    with pytest.raises(SpecError, match="steps can only increase"):
        refuse_other_job(spec(), spec(steps=5))


def test_another_machine_may_read_the_spec_while_machine_0_rewrites_it(tmp_path: Path) -> None:
    words = ("parallelism=ddp", "launch.nodes=2", "launch.node_rank=1", "parallelism.timeout_s=0.3")
    before = spec(*words, f"launch.rdzv_endpoint=127.0.0.1:{free_port()}")
    after = before.model_copy(update={"init_from": "outputs/stages/quick"})
    with pytest.raises(SpecError, match="init_from: cannot change"):
        refuse_other_job(before, after)
    with pytest.raises(DeadlineExceeded, match="machine 0 does not respond"):
        resume(RunFolder(tmp_path), before, after)


def test_a_day_is_that_of_the_first_command() -> None:
    assert check_spec(spec()).chat.date == today()
    assert check_spec(spec("chat.date=2026-01-02")).chat.date == "2026-01-02"


@pytest.fixture
def done(tmp_path: Path) -> RunFolder:
    """What a run of 10 steps leaves, as far as a resume looks at it first."""
    folder = RunFolder(tmp_path)
    write_spec(folder, spec())
    folder.status.write_text(json.dumps({"state": "done", "attempt": 1}))
    return folder


def test_an_override_that_no_step_of_a_finished_run_would_see_is_refused(
    done: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = spec("checkpoint.every=7", "evaluation.every=3")
    with pytest.raises(SpecError, match="has no effect") as caught:
        resume(done, spec(), changed)
    assert [p.key for p in caught.value.problems] == ["checkpoint", "evaluation"]
    assert "steps=20" in str(caught.value)
    assert resume(done, spec(), spec()) == 0 and "finished after 10 steps" in capsys.readouterr().out
    assert sorted(p.name for p in done.root.iterdir()) == ["spec.yaml", "status.json"]


@pytest.mark.parametrize(("schedule", "said"), [("cosine", True), ("linear", True), ("constant", False)])
def test_a_stretched_schedule_is_said(schedule: str, said: bool) -> None:
    words = [f"schedule={schedule}"]
    expected = f"note: schedule={schedule} now ends at step 20, not 10: the learning rate is that of a run of 20 steps"
    assert (expected in (longer_schedule_note(spec(*words), spec(*words, steps=20)) or "")) == said
    assert longer_schedule_note(spec(*words), spec(*words, "seed=1")) is None


def test_evaluations_that_cannot_be_compared_are_said() -> None:
    sets = "evaluation.sets.{}={{data: {{name: demo}}, limit: {}}}"
    before = spec(sets.format("a", 3))
    assert changed_evaluation_note(before, spec(sets.format("a", 3), sets.format("b", 3), "evaluation.every=3")) is None
    changed = changed_evaluation_note(before, spec(sets.format("a", 4), "evaluation.max_new_tokens=9"))
    assert changed is not None and "evaluation.max_new_tokens, evaluation.sets.a changed: values of eval/" in changed


@pytest.mark.parametrize(
    ("done", "longer", "total"), [pytest.param(3, "steps=12", 12, marks=pytest.mark.slow), (8, "epochs=2", 16)]
)
def test_a_resumed_run_has_the_learning_rates_of_its_new_length(
    done: int, longer: str, total: int, tmp_path: Path
) -> None:
    """From within the warm-up of 5 steps, and from the fall: step by step those of a run of that length."""
    schedule = ("schedule=cosine", "schedule.warmup_steps=5", "optimizer.lr=0.5")
    command.run(*TINY, *schedule, "evaluation.every=0", "checkpoint.every=1", f"steps={done}", cwd=tmp_path)
    said = command.run("resume", "latest", longer, cwd=tmp_path)
    assert f"schedule=cosine now ends at step {total}, not {done}: the learning rate is that of" in said
    lines = (tmp_path / "outputs/latest/metrics.jsonl").read_text().splitlines()
    found = {one["step"]: one["train/lr"] for one in map(json.loads, lines)}
    factors = [cosine(CosineConfig(warmup_steps=5), steps=done if at < done else total)(at) for at in range(total)]
    assert list(found.values()) == pytest.approx([0.5 * factor for factor in factors], rel=1e-12)


@pytest.mark.parametrize("content", ["", "{", "[1]", "\xff", '{"attempt": "two"}'])
def test_a_damaged_status_is_no_end_of_the_world(
    done: RunFolder, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    done.status.write_bytes(content.encode("latin-1"))
    assert read_status(done).get("state") is None
    assert ("status.json cannot be read" in caplog.text) == (content != '{"attempt": "two"}')
    assert next_attempt(done) == 2
    (done.attempts / "4").mkdir(parents=True)
    assert next_attempt(done) == 5, "no attempt writes over what an earlier one kept"
