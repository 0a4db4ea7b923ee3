"""Sweeps on the command line: what is typed, what is said of it, and whole sweeps of real runs."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import yaml

from runner.cli import sweep
from runner.cli.args import parse
from runner.cli.expand_sweep import Expansion, expand
from runner.cli.main import main
from runner.core.errors import SpecError
from runner.spec.metric_check import metric_problems
from runner.sweep import plan
from runner.sweep.plan import SweepFolder
from tests.sweep import toy


def varied(expansion: Expansion) -> list[str]:
    return [" ".join(f"{k}={v}" for k, v in member.varied.items()) for member in expansion.members]


def said(*words: str) -> list[str]:
    """Every problem of a command line, as `key: message`."""
    with pytest.raises(SpecError) as caught:
        expand(words)
    return [f"{p.key}: {p.message}" for p in caught.value.problems]


@pytest.mark.parametrize(
    ("words", "jobs"),
    [
        (["optimizer.lr=1e-4,3e-4", "seed=1,2"], 4),
        (["seed=range(1,4)"], 3),
        (["seed=choice(1,2,3)", "optimizer=adamw,sgd"], 6),
        (["+recipe=sft_demo,sft_npu", "model=tiny", "adapter=none", "device=cpu"], 2),
        (["+recipe=glob(sft_*,exclude=*npu)"], 2),
        (["optimizer.betas=[0.9,0.95],[0.9,0.99]"], 2),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_hydras_grammar_makes_the_jobs(words: list[str], jobs: int, workdir: Path) -> None:
    expansion = expand(words)
    assert len(expansion.members) == len(set(varied(expansion))) == jobs
    for member in expansion.members:  # each is what its own words make
        again = expand([*member.composed.overrides, "steps=101,102"]).members[0].composed.data
        assert again | {"steps": 0} == member.composed.data | {"steps": 0}


def test_the_last_axis_varies_fastest(workdir: Path) -> None:
    assert varied(expand(["seed=1,2", "steps=3,4"])) == [
        "seed=1 steps=3",
        "seed=1 steps=4",
        "seed=2 steps=3",
        "seed=2 steps=4",
    ]


def test_every_problem_of_every_job_at_once_and_whose_it_is(workdir: Path) -> None:
    found = said(
        "+recipe=sft_demo",
        "optimizer.lr=1e-4,-1,fast",
        "seed=1,2",
        "optimizer.lrr=1",
        "device=cpu,gpu",
        "sweep.paralel=2",
    )
    assert found[1].startswith("device: no device named 'gpu'; did you mean 'cuda'?")
    assert found[1].endswith(") (with device=gpu)")
    assert [found[0], *found[2:]] == [
        "optimizer.lrr: not an option of optimizer=adamw; did you mean 'lr'?",
        "optimizer.lr: expected a number above 0 or null, got -1 (with optimizer.lr=-1)",
        "optimizer.lr: expected a number above 0 or null, got 'fast' (with optimizer.lr=fast)",
        "sweep.paralel: not an option of a sweep; did you mean 'parallel'?",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["steps=3"], "the sweep varies"),
        (["seed=1,1"], "jobs 0 and 1 are the same job (seed=1)"),
        (["optimizer.lr=interval(0,1)"], "list the values"),
        (["+recipe=glob(nothing_*)"], "matches nothing"),
        (["seed=1,2", "sweep.fail_fast=true", "sweep.max_failures=2"], "leave one out"),
        (["seed=1,2", "sweep.retry_wait_s=2"], "needs sweep.retries"),
        (
            ["seed=1,2", "sweep.metric=train/tokens"],
            "must be set, max or min for each, because sweep.metric has no known direction",
        ),
        (["seed=1,2", "sweep.metric_mode=max"], "needs sweep.metric"),
        (["seed=1,2", "sweep.over.seed=[1]"], "values as KEY=1,2,3"),
        (["seed=1,2", "sweep.parallel=0"], "at least 1"),
        (["seed=range(0,200)", "steps=range(1,200)"], "39800 jobs are more than the limit of 10000"),
        (["seed=1,2", "seed=3"], "set twice"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_what_makes_no_sweep_is_refused(words: list[str], message: str, workdir: Path) -> None:
    assert any(message in problem for problem in said(*words)), said(*words)
    assert list(workdir.iterdir()) == []


GRPO = ("+recipe=grpo_demo", "init_from=null", "seed=1,2")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["seed=1,2", "sweep.metric=eval/exact_mach", "sweep.metric_mode=max"],
            "unknown metric; did you mean eval/exact_match?",
        ),
        (["seed=1,2", "sweep.metric=reward/mean"], "no job measures reward/mean: algorithm=sft has no reward"),
        (["seed=1,2", "sweep.metric=rollout/length", "sweep.metric_mode=max"], "algorithm=sft does not sample"),
        (["seed=1,2", "sweep.metric=eval/loss", "evaluation.every=0"], "evaluation.every=0 disables evaluation"),
        ([*GRPO, "sweep.metric=reward/maen", "sweep.metric_mode=max"], "did you mean reward/mean?"),
        ([*GRPO, "sweep.metric=eval/reward/maen", "sweep.metric_mode=max"], "did you mean eval/reward/mean?"),
        ([*GRPO, "sweep.metric=policy/entropie", "sweep.metric_mode=max"], "did you mean policy/entropy?"),
        ([*GRPO, "sweep.metric=rewards/mean", "sweep.metric_mode=max"], "did you mean reward/mean?"),
        ([*GRPO, "sweep.metric=policy/kl", "sweep.metric_mode=min"], "type algorithm.kl_estimator=k3"),
        ([*GRPO, "sweep.metric=correction/clip_frac", "sweep.metric_mode=min"], "type algorithm.correction=tis"),
        ([*GRPO, "sweep.metric=eval/kl_baseline", "sweep.metric_mode=min"], "unknown metric"),
        ([*GRPO, "sweep.metric=eval/pass@8", "sweep.metric_mode=max"], "evaluation.samples=4, only mean@4"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_a_metric_that_no_job_can_have_is_refused_before_a_folder_is_made(
    words: list[str], message: str, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["-m", *words]) == 2
    said = capsys.readouterr().err
    assert "sweep.metric" in said and message in said
    assert list(workdir.iterdir()) == []


def test_a_metric_that_one_of_the_jobs_can_have_is_let_in(workdir: Path) -> None:
    members = expand(["evaluation.every=0,5", "sweep.metric=eval/loss"]).members
    assert metric_problems(("eval/loss",), [one.composed.spec for one in members]) == []
    assert metric_problems(("eval/loss",), [members[0].composed.spec])


def test_metrics_of_components_evaluations_and_the_machine_are_let_in(workdir: Path) -> None:
    parts = "reward.parts=[{name: exact}, {name: length, target: 4}]"
    words = [
        "+recipe=grpo_demo",
        "init_from=null",
        "reward=sum",
        parts,
        "+evaluation.sets.held={samples: 4}",
        "seed=1,2",
    ]
    specs = [member.composed.spec for member in expand(words).members]
    own = ("reward/length", "policy/clip_frac_low", "mismatch/logprob_diff", "rollout/length", "device/power_w")
    held_out = ("eval/reward/mean", "eval/exact_match_ci_low", "eval/held/pass@4", "eval/held/reward/exact")
    assert metric_problems((*own, *held_out), specs) == []
    assert len(metric_problems(("reward/format", "eval/reward/format", "eval/held/pass@8"), specs)) == 3


def recipe(workdir: Path, text: str) -> None:
    (workdir / "recipes").mkdir(exist_ok=True)
    (workdir / "recipes" / "mine.yaml").write_text("defaults: [sft_demo]\n" + text)


def test_a_recipe_can_be_a_sweep(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe(workdir, "sweep:\n  parallel: 1\n  over:\n    optimizer.lr: [1.0e-4, 3.0e-4]\n    seed: range(1,3)\n")
    expansion = expand(["+recipe=mine"])
    assert varied(expansion) == [f"optimizer.lr={lr} seed={seed}" for lr in ("0.0001", "0.0003") for seed in (1, 2)]
    assert expansion.options.parallel == 1
    assert varied(expand(["+recipe=mine", "seed=7"])) == ["optimizer.lr=0.0001", "optimizer.lr=0.0003"]
    assert len(expand(["+recipe=mine", "seed=7,8,9", "sweep.parallel=2"]).members) == 6
    assert expand(["+recipe=mine", "sweep.parallel=2"]).options.parallel == 2
    assert main(["--cfg", "job", "+recipe=mine"]) == 0
    captured = capsys.readouterr()
    assert "sweep" not in yaml.safe_load(captured.out)
    assert captured.err == "recipe/mine: its section sweep is for run -m; this is one run\n"


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ("{seed: 3}", "expected a list of values"),
        ("{seed: []}", "expected a list of values"),
        ("{recipe: [a, b]}", "a recipe cannot vary the recipe"),
        ("[1, 2]", "expected a section"),
        ("{sead: [1, 2]}", "not an option of a job; did you mean 'seed'?"),
        ("{seed: 'interval(0,1)'}", "list the values"),
    ],
)
def test_mistakes_in_a_recipes_sweep_name_the_recipe(workdir: Path, over: str, message: str) -> None:
    recipe(workdir, f"sweep:\n  over: {over}\n")
    assert any(message in problem for problem in said("+recipe=mine")), said("+recipe=mine")


def test_texts_with_signs_stay_what_they_are(workdir: Path) -> None:
    recipe(workdir, "sweep:\n  over:\n    data.path: ['a, b.jsonl', \"it's (1).jsonl\", 'c d']\n")
    words = ["+recipe=mine", "data=file"]
    assert [m.composed.spec.data.path for m in expand(words).members] == ["a, b.jsonl", "it's (1).jsonl", "c d"]


def test_a_spec_can_be_varied(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cfg", "job", "+recipe=sft_demo", "steps=7"]) == 0
    (workdir / "spec.yaml").write_text(capsys.readouterr().out)
    assert main(["-m", "--spec", "spec.yaml", "--cfg", "job", "seed=1,2"]) == 0
    found = list(yaml.safe_load_all(capsys.readouterr().out))
    assert [(d["seed"], d["steps"]) for d in found] == [(1, 7), (2, 7)]


def test_two_hundred_jobs_compose_in_seconds(workdir: Path) -> None:
    begin = time.process_time()
    lrs = ",".join(f"{i}e-5" for i in range(1, 21))
    assert len(expand(["+recipe=sft_demo", f"optimizer.lr={lrs}", "seed=range(0,10)"]).members) == 200
    assert time.process_time() - begin < 20


def planned(*words: str) -> tuple[SweepFolder, list[dict[str, object]]]:
    folder = SweepFolder(Path("outputs/sweeps/20260101-000000-x-0000"))
    made = sweep.make_plan(folder, parse(["-m", *words]), expand(words), ())
    return folder, [made.data(job) for job in made.jobs]


def test_wandb_gets_a_group_and_names_that_say_what_varies(workdir: Path) -> None:
    folder, data = planned("+recipe=sft_demo", "optimizer.lr=1e-3,2e-3", "seed=1,2")
    trackers = [d["tracker"] for d in data]
    assert {t["run_group"] for t in trackers} == {folder.root.name}  # type: ignore[index]
    assert [t["display_name"] for t in trackers] == [f"lr={lr} seed={s}" for lr in (0.001, 0.002) for s in (1, 2)]  # type: ignore[index]
    _, data = planned("+recipe=sft_demo", "seed=1,2", "tracker.run_group=mine")
    assert {d["tracker"]["run_group"] for d in data} == {"mine"}  # type: ignore[index]


def test_jobs_keep_what_no_file_may_say_for_the_user(workdir: Path) -> None:
    words = ("data=demo", "model=hf", "model.path=some/where", "model.trust_remote_code=true", "seed=1,2")
    made = sweep.make_plan(SweepFolder(workdir), parse(["-m", *words]), expand(words), ())
    assert [job.again for job in made.jobs] == [("model.trust_remote_code=true",)] * 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sweep"], "resume, status or report"),
        (["sweep", "resum", "latest"], "did you mean 'resume'?"),
        (["sweep", "resume", "latest"], "is not a sweep"),
        (["sweep", "status", "latest", "x"], "expected only a sweep's folder"),
        (["sweep", "report", "latest", "--only", "3"], "expected only a sweep's folder"),
        (["sweep", "resume", "--only", "three"], "expected numbers of jobs such as 3,7"),
        (["sweep", "resume", "--only", "3", "--retry-failed"], "leave --retry-failed out"),
        (["-m", "seed=1,2", "--folder", "x"], "--folder is for one run"),
        (
            ["+recipe=sft_demo", "sweep.parallel=2"],
            "is an option of a sweep; to start a sweep over several values, type: run -m",
        ),
        (["report", "a", "b"], "one run"),
        (["diff", "a"], "two runs"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_usage(words: list[str], message: str, workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err
    assert list(workdir.iterdir()) == []


def test_a_job_that_never_fits_is_refused_before_a_folder_is_made(
    workdir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    many = len(os.sched_getaffinity(0)) + 1
    assert main(["-m", "+recipe=sft_demo", "tracker=none", "seed=1,2", f"device.threads={many}"]) == 2
    assert f"a job needs {many} cores, but this machine has {many - 1}" in capsys.readouterr().err
    assert list(workdir.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["optimizer.lr=1"], "a sweep are fixed"),
        (["sweep.paralel=1"], "did you mean 'parallel'?"),
        (["sweep.parallel=0"], "at least 1"),
        (["sweep.metric=eval/loss"], "cannot change in a resumed sweep"),
        (["sweep.over.seed=[1]"], "values as KEY=1,2,3"),
        (["sweep.max_failures=3"], "sweep.fail_fast=true stops at the first failure"),  # of when it began
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_what_a_resume_cannot_set(
    words: list[str], message: str, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toy.start(workdir / "outputs" / "sweeps", ["raises"], fail_fast=True)
    assert main(["sweep", "resume", "latest", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "message"),
    [("sweep.sampler=cmaes", "cmaes needs two or more numbers"), ("sweep.trials=1", "already has 2 jobs")],
)
def test_what_a_search_cannot_go_on_with(
    word: str, message: str, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("optuna")
    _, code = toy.search(workdir / "outputs" / "sweeps", ["good"], trials=2)
    assert code == 0 and main(["sweep", "resume", "latest", word]) == 2
    assert message in capsys.readouterr().err


def test_a_resume_sets_an_option_anew(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begun = plan.Plan("x", (), {}, [], {"retries": 2, "fail_fast": True})
    options = sweep._resume_options(begun, ["sweep.retry_wait_s=3", "sweep.fail_fast=false"])
    assert (options.retries, options.retry_wait_s, options.fail_fast) == (2, 3.0, False)


def test_the_help_of_a_sweep_says_what_can_be_typed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "--help"]) == 0
    out = capsys.readouterr().out
    for word in ("run -m", "--retry-failed", "--only", "sweep.parallel", "sweep.timeout_s", "status", "report"):
        assert word in out
    assert parse(["sweep", "resume", "latest", "--only", "3,7"]).only == (3, 7)
