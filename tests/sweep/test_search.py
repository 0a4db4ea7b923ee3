"""Searches: they find what is good, stop what is hopeless, and continue where they were killed."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from runner.cli import sweep
from runner.cli.args import parse
from runner.cli.expand_sweep import Expansion, expand
from runner.cli.main import main
from runner.core.errors import EnvironmentProblem, Problem, SpecError
from runner.sweep import plan as plans
from runner.sweep import search as searches
from runner.sweep.config import SweepConfig
from runner.sweep.job import from_json
from runner.sweep.plan import JobPlan, Plan, Ranking, SweepFolder, SweepState, find_sweep
from runner.sweep.results import MetricsTail, read_results
from runner.sweep.search import OptunaTrials, Propose
from runner.sweep.space import Dimension, SearchSpace
from tests.run_dir.test_manifest import CANARIES
from tests.sweep import toy

pytest.importorskip("optuna")
ROOT = Path(__file__).resolve().parents[2]
BASE = ("+recipe=sft_demo", "sweep.search=optuna", "sweep.trials=4")


def space(*words: str) -> dict[str, Dimension]:
    found: Expansion = expand([*BASE, *words])
    return {dimension.key: dimension for dimension in found.space}


def study(folder: SweepFolder) -> list[str]:
    """The states of the trials in the journal, as another program reads them."""
    program = (
        "import optuna, sys; from optuna.storages import JournalStorage as S;"
        "from optuna.storages.journal import JournalFileBackend as B;"
        "print(*[t.state.name for t in optuna.load_study(study_name='sweep', storage=S(B(sys.argv[1]))).trials])"
    )
    command = [sys.executable, "-W", "ignore", "-c", program, str(folder.root / "optuna.log")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def test_the_space_is_hydras_grammar(workdir: Path) -> None:
    found = space("optimizer.lr=tag(log,interval(1e-5,1e-2))", "seed=range(0,10,3)", "optimizer=adamw,sgd", "steps=5")
    lr, seed, which = found["optimizer.lr"], found["seed"], found["optimizer"]
    assert (lr.kind, lr.low, lr.high, lr.log) == ("float", 1e-5, 1e-2, True)
    assert (seed.kind, seed.low, seed.high, seed.step) == ("int", 0, 9, 3)
    assert which.values == (("optimizer=adamw", "adamw"), ("optimizer=sgd", "sgd"))
    assert space("algorithm.batch_size=int(interval(8,64))")["algorithm.batch_size"].kind == "int"
    assert lr.override_for(0.001234567) == ("optimizer.lr=0.00123457", "0.00123457")


def test_a_recipe_can_be_a_search(workdir: Path) -> None:
    (workdir / "recipes").mkdir()
    (workdir / "recipes" / "mine.yaml").write_text(
        "defaults: [sft_demo]\nsweep:\n  search: optuna\n  trials: 3\n  over:\n"
        "    optimizer.lr: tag(log,interval(1e-5,1e-2))\n    seed: [1, 2]\n"
    )
    found = expand(["+recipe=mine"])
    assert [d.key for d in found.space] == ["optimizer.lr", "seed"] and found.options.trials == 3
    assert [d.key for d in expand(["+recipe=mine", "seed=7"]).space] == ["optimizer.lr"]


def test_recipes_and_components_are_dimensions(workdir: Path) -> None:
    """What a recipe varies itself exists in its own jobs only; all choices are tried together, with all ends."""
    (workdir / "recipes").mkdir()
    over = "sweep:\n  over:\n    optimizer.lr: interval(1e-5,1e-2)\n    seed: [1, 2]\n"
    (workdir / "recipes" / "a.yaml").write_text(f"defaults: [sft_demo]\n{over}")
    (workdir / "recipes" / "b.yaml").write_text(
        "defaults: [dpo_demo]\nsweep:\n  over:\n    algorithm.beta: interval(0.1,1)\n"
    )
    found = expand([*BASE[1:], "+recipe=choice(a,b)", "optimizer=adamw,sgd"])
    assert [d.name for d in found.space] == [
        "recipe", "optimizer", "+recipe=a: optimizer.lr", "+recipe=a: seed", "+recipe=b: algorithm.beta",
    ]  # fmt: skip
    search = SearchSpace(found.space, found.fixed)
    corners = [varied for _, varied in search.corners()]
    assert {(v["recipe"], v["optimizer"]) for v in corners} == {(r, o) for r in "ab" for o in ("adamw", "sgd")}
    assert all(("algorithm.beta" in v) == (v["recipe"] == "b") == ("seed" not in v) for v in corners)
    values = {"recipe": "+recipe=b", "optimizer": "optimizer=sgd", "+recipe=b: algorithm.beta": 0.25}
    assert [d.name for d in search.only_in(values)] == ["+recipe=b: algorithm.beta"]
    assert search.words(values)[0] == ["+recipe=b", "optimizer=sgd", "algorithm.beta=0.25"]
    again = from_json(SearchSpace, json.loads(json.dumps(asdict(search))))
    assert again == search


def test_hydras_way_to_ask_for_it(workdir: Path) -> None:
    found = expand(["+recipe=sft_demo", "hydra/sweeper=optuna", "sweep.trials=2", "optimizer.lr=interval(1e-5,1e-2)"])
    assert found.options.search == "optuna"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*BASE, "steps=3"], "the sweep varies"),
        ([*BASE, "optimizer.lr=interval(1,0)"], "is empty"),
        ([*BASE, "optimizer.lr=tag(log,interval(0,1))"], "needs an interval above 0"),
        ([*BASE, "optimizer.lr=interval(-1,1)"], "expected a number above 0 or null, got -1"),
        ([*BASE, "optimizer.lr=tag(wild,interval(1,2))"], "tag(wild,…) is not supported"),
        ([*BASE, "seed=tag(log,choice(1,2))"], "not for a choice"),
        ([*BASE, "algorithm.batch_size=interval(8,64)"], "expected an integer at least 1, got 42.608"),
        (
            [*BASE, "seed=1,2", "sweep.metric=eval/loss,reward/mean", "sweep.prune=true"],
            "early stopping of jobs needs one metric",
        ),
        ([*BASE, "seed=1,2", "sweep.metric=eval/loss,perf/x"], "sweep.metric has no known direction: perf/x"),
        ([*BASE, "seed=1,2", "sweep.metric=eval/loss,perf/x", "sweep.metric_mode=min"], "has 1 entries for 2 metrics"),
        ([*BASE, "seed=1,2", "sweep.metric=eval/loss,eval/loss"], "names a metric twice"),
        (["sweep.search=optuna", "seed=1,2"], "sweep.trials: must be set"),
        (["sweep.trials=3", "seed=1,2"], "sweep.trials: needs sweep.search=optuna"),
        (["sweep.prune=true", "seed=1,2"], "sweep.prune: needs sweep.search=optuna"),
        (["sweep.search=optuma", "seed=1,2"], "'optuma'"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_what_cannot_be_searched_is_refused(words: list[str], message: str, workdir: Path) -> None:
    with pytest.raises(SpecError) as caught:
        expand(words)
    assert message in str(caught.value)


def test_a_search_must_know_what_is_better(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", "model=tiny", "optimizer.lr=interval(1e-4,1e-2)", *BASE[1:]]) == 2
    assert "sweep.metric: must be set" in capsys.readouterr().err


def test_it_finds_a_good_value_and_stops_hopeless_jobs(tmp_path: Path) -> None:
    folder, code = toy.search(tmp_path, ["curve"], trials=20, prune=True, parallel=2)
    assert code == 0
    states = toy.states(folder)
    assert len(states) == 20 and set(states) == {"done", "pruned"}
    results = json.loads(folder.results.read_text())
    best = float(results["jobs"][results["best"]]["varied"]["optimizer.lr"])
    assert abs(math.log10(best) + 3) < 0.6  # a grid of seven values from 1e-6 to 1 comes as close as 0.5
    assert sorted(study(folder)) == ["COMPLETE"] * states.count("done") + ["PRUNED"] * states.count("pruned")
    assert "search   optuna, tpe; bad jobs are stopped early" in folder.log.read_text()


def test_killed_half_way_it_goes_on(tmp_path: Path) -> None:
    names = ["curve"] * 3 + ["saves"] + ["curve"] * 4  # "saves" waits until it is told to end
    program = [sys.executable, "-m", "tests.sweep.toy"]
    command = [*program, str(tmp_path), "search", ",".join(names), '{"trials": 8, "parallel": 1}']
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 200
    while not list(tmp_path.glob("*/003/metrics.jsonl")):
        assert time.monotonic() < end
        time.sleep(0.01)
    process.kill()
    process.wait()
    [root] = [path for path in tmp_path.iterdir() if not path.is_symlink()]
    folder = SweepFolder(root)
    begun = len(find_sweep(str(root))[1].jobs)
    assert begun == 4
    assert toy.go_on(folder, names) == 0
    assert toy.states(folder) == ["done"] * 8 and study(folder) == ["COMPLETE"] * 8
    assert [toy.starts(folder, i) for i in range(begun - 1)] == [1] * (begun - 1)
    assert toy.go_on(folder, names, trials=10) == 0  # a search can be made longer
    assert len(SweepState.read(folder)) == 10


def test_failures_are_told_and_a_second_try_counts(tmp_path: Path) -> None:
    folder, code = toy.search(tmp_path, ["curve", "raises"], trials=4, parallel=1)
    assert (code, toy.states(folder)) == (9, ["done", "failed"] * 2)
    assert study(folder) == ["COMPLETE", "FAIL"] * 2
    found, made = find_sweep(str(folder.root))
    wanted, options = toy.commands.ResumeSelection(retry_failed=True), toy.SweepConfig.model_validate(made.options)
    assert toy.resume_with(found, wanted, options, toy.command_of(found, ["curve"]), toy.propose) == 0
    assert sorted(study(folder)) == ["COMPLETE"] * 4 + ["FAIL"] * 2


def test_a_search_is_resumed_where_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = toy.search(tmp_path / "sweeps", ["curve"], trials=1)
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", "resume", str(folder.root), "sweep.trials=2"]) == 2
    assert "resume it in its first folder: cd " in capsys.readouterr().err


@pytest.mark.parametrize("edited", ["recipes/mine.yaml", "conf/optimizer/sgd.yaml", "spec.yaml"])
def test_a_file_that_is_edited_during_a_search_changes_no_job(
    edited: str, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("recipes", "conf/optimizer"):
        (workdir / name).mkdir(parents=True)
    (workdir / "recipes/mine.yaml").write_text("defaults: [sft_demo]\nsteps: 40\n")
    (workdir / "conf/optimizer/sgd.yaml").write_text("name: sgd\nmomentum: 0.5\n")
    assert main(["--cfg", "job", "+recipe=mine"]) == 0
    (workdir / "spec.yaml").write_text(capsys.readouterr().out)
    words = ["-m", *BASE[1:], "optimizer=adamw,sgd", "optimizer.lr=interval(1e-4,1e-2)", "sweep.metric=eval/loss"]
    args = parse([*words, *(["--spec", "spec.yaml"] if edited == "spec.yaml" else ["+recipe=mine"])])
    found = expand(args.words, spec=args.spec)
    folder = plans.create_sweep_folder("x")
    made = sweep.make_plan(folder, args, found, ())
    plans.write_plan(folder, made)
    SweepState.create(folder, 0)

    def job() -> dict[str, Any]:
        propose = sweep.proposer(folder, made, (), found.draft)
        assert made.search is not None and propose is not None
        chosen, varied = made.search.words({"optimizer": "optimizer=sgd", "optimizer.lr": 2e-4})
        data = made.data(propose(0, chosen, varied))
        return {"steps": data["steps"], **data["optimizer"]}

    before = job()
    assert (before["steps"], before["momentum"], before["lr"]) == (40, 0.5, 2e-4)
    whole = (workdir / edited).read_text()
    (workdir / edited).write_text(whole.replace("40", "400").replace("0.5", "0.9"))
    assert job() == before
    assert main(["sweep", "resume", str(folder.root)]) == 2
    assert "a recipe, a config file or a default of this search has changed since it began" in capsys.readouterr().err
    (workdir / edited).write_text(whole + ("name: another\n" if edited == "recipes/mine.yaml" else ""))
    assert made.search is not None and sweep.resume_draft(made.search)  # a name may have the date


def test_a_job_that_a_search_proposes_has_no_secret(workdir: Path) -> None:
    (workdir / "recipes").mkdir()
    text = f"defaults: [sft_demo, override /tracker: wandb]\ntracker:\n  tags: [{CANARIES['openai']}]\n"
    (workdir / "recipes/mine.yaml").write_text(text)
    args = parse(["-m", *BASE[1:], "+recipe=mine", "optimizer.lr=interval(1e-4,1e-2)", "sweep.metric=eval/loss"])
    found = sweep.mask_expansion(expand(args.words))
    made = sweep.make_plan(SweepFolder(workdir), args, found, ())
    propose = sweep.proposer(SweepFolder(workdir), made, (), found.draft)
    assert made.search is not None and propose is not None
    job = propose(0, *made.search.words({"optimizer.lr": 2e-4}))
    assert CANARIES["openai"] not in json.dumps(made.data(job)) and made.data(job)["tracker"]["tags"]


X = Dimension("x", "x", "float", 1e-4, 1.0, log=True)
Y = Dimension("y", "y", "int", 1, 64)
KIND = Dimension("kind", "kind", "choice", values=(("kind=a", "a"), ("kind=b", "b")))
OF_A = Dimension("z", "z", "float", 0.0, 1.0, given="kind=a")
LOSS, SPEED = Ranking("eval/loss", "min", "last", ""), Ranking("perf/speed", "max", "last", "")


class Simulated:
    """A search whose jobs are done at once, with these values of a loss and a speed; no process runs."""

    def __init__(self, where: Path, space: tuple[Dimension, ...], rankings: tuple[Ranking, ...] = (LOSS,)) -> None:
        self.folder = plans.create_sweep_folder("toy", where)
        self.plan = Plan("toy", (), {"seed": 3}, [], {}, rankings, SearchSpace(space, ()))
        plans.write_plan(self.folder, self.plan)
        self.said: list[str] = []
        self.record = SweepState.create(self.folder, 0)

    def run(
        self, trials: int, propose: Propose = toy.propose, tell: bool = True, **options: object
    ) -> list[dict[str, str]]:
        config = SweepConfig.model_validate({"search": "optuna", "trials": trials, **options})
        source = OptunaTrials(self.folder, self.plan, config, propose, self.said.append)
        while (job := source.propose_next()) is not None:
            plans.append_job(self.folder, self.plan, job)
            self.record.extend_to(len(self.plan.jobs))
            self.folder.run(job.index).root.mkdir()
            x, y = (float(job.varied.get(key, 1)) for key in "xy")
            row = {"step": 1, "eval/loss": (math.log10(x) + 2) ** 2 + y / 64, "perf/speed": y}
            self.folder.run(job.index).metrics.write_text(json.dumps(row) + "\n")
            self.record.update(job.index, state="done")
            if tell:
                source.record_end(job.index, self.record[job.index])
        return [dict(job.varied) for job in self.plan.jobs]


SLOW = ("gp",)  # imports torch and scipy
NAMES = [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in searches.CLASSES]


@pytest.mark.parametrize("name", NAMES)
def test_every_sampler_works_and_goes_on_with_new_values(name: str, tmp_path: Path) -> None:
    pytest.importorskip("scipy")
    pytest.importorskip("cmaes")
    search = Simulated(tmp_path, (X, Y))
    search.run(12, sampler=name)
    found = search.run(18, sampler=name)  # as a resume does
    assert len({tuple(job.items()) for job in found}) == 18, "no job twice"
    assert study(search.folder) == ["COMPLETE"] * 18


@pytest.mark.parametrize("name", ["tpe", "random", "nsgaii"])
def test_dimensions_of_some_jobs_only(name: str, tmp_path: Path) -> None:
    found = Simulated(tmp_path, (X, KIND, OF_A)).run(15, sampler=name)
    assert {job["kind"] for job in found} == {"a", "b"}
    assert all(("z" in job) == (job["kind"] == "a") for job in found)


def test_several_metrics_are_searched_together(tmp_path: Path) -> None:
    search = Simulated(tmp_path, (X, Y), (LOSS, SPEED))
    search.run(25)
    program = (
        "import optuna, sys; from optuna.storages import JournalStorage as S;"
        "from optuna.storages.journal import JournalFileBackend as B;"
        "s = optuna.load_study(study_name='sweep', storage=S(B(sys.argv[1])));"
        "print(*[d.name for d in s.directions], *s.metric_names, *sorted(t.user_attrs['job'] for t in s.best_trials))"
    )
    command = [sys.executable, "-W", "ignore", "-c", program, str(search.folder.root / "optuna.log")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    front = sorted(row.job.index for row in read_results(search.folder, search.plan, search.record).pareto_front)
    assert said == ["MINIMIZE", "MAXIMIZE", "eval/loss", "perf/speed", *map(str, front)] and 1 < len(front) < 25


def test_a_crash_between_the_end_of_a_job_and_the_study(tmp_path: Path) -> None:
    search = Simulated(tmp_path, (X,))
    search.run(3, tell=False)
    assert study(search.folder) == ["RUNNING"] * 3
    search.run(5)
    assert study(search.folder) == ["COMPLETE"] * 5


def test_what_was_reported_before_a_crash_is_not_reported_again(tmp_path: Path) -> None:
    search = Simulated(tmp_path, (X,))
    search.run(1, tell=False)
    search.record.update(0, state="running")
    watch = MetricsTail(search.folder.run(0).metrics)
    watch.read()
    config = SweepConfig.model_validate({"search": "optuna", "trials": 1, "prune": True})
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="The reported value is ignored")
        for _ in range(2):  # the second is a resume
            source = OptunaTrials(search.folder, search.plan, config, toy.propose, search.said.append)
            assert not source.should_prune(0, watch)


def test_a_proposal_that_is_no_job_is_said_and_another_is_drawn(tmp_path: Path) -> None:
    def picky(index: int, words: Sequence[str], varied: Mapping[str, str]) -> JobPlan:
        if int(varied["y"]) % 2:
            raise SpecError([Problem("y", "is odd")])
        return toy.propose(index, words, varied)

    search = Simulated(tmp_path, (Y,))
    assert all(int(job["y"]) % 2 == 0 for job in search.run(6, picky)) and len(search.plan.jobs) == 6
    assert search.said and all("not a valid job, so another one is sampled: y: is odd" in line for line in search.said)
    states = study(search.folder)
    assert states.count("FAIL") == len(search.said) and states.count("COMPLETE") == 6

    def never(index: int, words: Sequence[str], varied: Mapping[str, str]) -> JobPlan:
        raise SpecError([Problem("y", "is wrong")])

    with pytest.raises(SpecError, match=r"50 proposals in a row were not valid jobs[\s\S]*y: is wrong"):
        search.run(7, never)


def test_a_job_without_the_metric_is_said(tmp_path: Path) -> None:
    search = Simulated(tmp_path, (X,), (Ranking("eval/other", "max", "last", ""),))
    search.run(2)
    assert study(search.folder) == ["FAIL"] * 2
    assert search.said[0] == "job 0  finished without a finite eval/other: the search counts it as failed"


@pytest.mark.parametrize(
    ("space", "options", "objectives", "message"),
    [
        ((X, KIND), {"sampler": "cmaes"}, 1, "cmaes supports only numbers, but kind is a choice"),
        ((X, KIND), {"sampler": "qmc"}, 1, "qmc supports only numbers, but kind is a choice"),
        ((X,), {"sampler": "cmaes"}, 1, "two or more numbers"),
        ((X, Y), {"sampler": "cmaes"}, 2, "cmaes supports one metric"),
        ((X, KIND, OF_A), {"sampler": "gp"}, 1, "gp needs the same varied keys in all jobs, unlike kind=a: z"),
        ((KIND, Dimension("n", "n", "int", 1, 5, step=2)), {}, 1, "there are only 6 different jobs"),
    ],
    ids=str,
)
def test_what_a_sampler_cannot_do_is_refused(
    space: tuple[Dimension, ...], options: dict[str, str], objectives: int, message: str
) -> None:
    config = SweepConfig.model_validate({"search": "optuna", "trials": 9, **options})
    [problem] = searches.search_problems(config, SearchSpace(space, ()), objectives)
    assert message in problem.message


def test_what_is_missing_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searches, "find_spec", lambda name: None if name in ("cmaes", "scipy") else name)
    assert searches.load_optuna("tpe") is not None
    for name, package in (("cmaes", "cmaes"), ("gp", "scipy"), ("qmc", "scipy")):
        with pytest.raises(EnvironmentProblem) as caught:
            searches.load_optuna(name)
        said = f"sweep.sampler={name} needs the package {package}: pip install 'posttrain-run[optuna]'"
        assert str(caught.value) == said
