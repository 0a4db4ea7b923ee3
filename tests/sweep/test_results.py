"""What a sweep's results say: who wins, means over seeds, files that other programs read."""

from __future__ import annotations

import csv
import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runner.sweep import plan as plans
from runner.sweep import report as reports
from runner.sweep.plan import JobPlan, Plan, Ranking, SweepFolder, SweepState
from runner.sweep.report import write_page
from runner.sweep.results import Results, Score, aggregate_seeds, mean_with_interval, read_results, write_files
from runner.trainer.evaluation_metrics import t_quantile
from tests.tools.report.test_pages import BROWSER, NASTY, checked, in_a_browser

MAX = Ranking("eval/accuracy", "max", "last", "sweep.metric")


def sweep(where: Path, curves: dict[tuple[str, str], list[float]], ranking: Ranking | None = MAX) -> Results:
    """A finished sweep over (lr, seed) with these curves of eval/accuracy; an empty one is a failed job."""
    folder = plans.create_sweep_folder("toy", where)
    jobs = list(
        JobPlan(i, {"optimizer.lr": lr, "seed": seed}, (f"optimizer.lr={lr}", f"seed={seed}"))
        for i, (lr, seed) in enumerate(curves)
    )
    made = Plan("toy", ("seed=1,2",), {"steps": 3}, jobs, {}, (ranking,) if ranking else ())
    plans.write_plan(folder, made)
    record = SweepState.create(folder, len(jobs))
    for i, values in enumerate(curves.values()):
        folder.run(i).root.mkdir()
        folder.run(i).metrics.write_text(
            "".join(json.dumps({"step": s, "eval/accuracy": v}) + "\n" for s, v in enumerate(values, 1))
        )
        record.update(i, **({"state": "done"} if values else {"state": "failed", "error": NASTY, "exit_code": 1}))
    return read_results(folder, made, record)


CURVES = {
    ("1", "1"): [0.9, 0.5],
    ("1", "2"): [0.1, 0.6],
    ("2", "1"): [0.2, 0.7],
    ("2", "2"): [],
    ("3", "1"): [0.2, 0.4],
}


def test_the_last_value_wins_or_the_best_one(tmp_path: Path) -> None:
    results = sweep(tmp_path, CURVES)
    assert results.best is not None and (results.best.job.index, results.best.scores) == (2, (Score(0.7, 2),))
    results = sweep(tmp_path, CURVES, replace(MAX, take="best"))
    assert results.best is not None and (results.best.job.index, results.best.scores) == (0, (Score(0.9, 1),))
    results = sweep(tmp_path, CURVES, replace(MAX, mode="min"))
    assert results.best is not None and results.best.job.index == 4


def test_the_best_value_is_one_that_a_checkpoint_has(tmp_path: Path) -> None:
    """As `run export … --checkpoint best` takes it: of the saved steps, of which the best one stays."""
    results = sweep(tmp_path, CURVES, replace(MAX, take="best"))
    for index, steps in ((0, (2,)), (1, (1, 2)), (2, (1,))):
        for step in steps:
            path = results.folder.run(index).checkpoints / f"step-{step:08d}" / "MANIFEST.json"
            path.parent.mkdir(parents=True)
            path.touch()
    again = read_results(results.folder, results.plan, SweepState.read(results.folder))
    scores = [(Score(0.5, 2),), (Score(0.6, 2),), (Score(0.2, 1),), (None,), (Score(0.4, 2),)]
    assert [row.scores for row in again.results] == scores
    assert again.best is not None and again.best.job.index == 1


@pytest.mark.parametrize("take", ["last", "best"])
def test_the_evaluation_before_the_first_step_ranks_nothing(tmp_path: Path, take: Any) -> None:
    results = sweep(tmp_path, {("1", "1"): [0.3, 0.4], ("2", "1"): [0.2]}, replace(MAX, take=take))
    for index in (0, 1):
        path = results.folder.run(index).metrics
        lines = path.read_text().splitlines()[: 2 - 2 * index]  # job 1 has been evaluated before training alone
        path.write_text("".join(f"{line}\n" for line in ['{"step": 0, "eval/accuracy": 0.9}', *lines]))
    record = SweepState.create(results.folder, 2)
    record.update(0, state="done")
    record.update(1, state="done")
    again = read_results(results.folder, results.plan, record)
    assert [one.scores for one in again.results] == [(Score(0.4, 2),), (None,)]


def test_without_a_metric_the_first_usual_one_that_all_have(tmp_path: Path) -> None:
    results = sweep(tmp_path, CURVES, None)
    assert [(ranking.metric, ranking.mode) for ranking in results.rankings] == [("eval/accuracy", "max")]


def test_a_job_whose_last_value_is_not_finite_is_not_ranked_by_an_earlier_one(tmp_path: Path) -> None:
    curves = {("1", "1"): [0.9, math.nan], ("1", "2"): [0.3, 0.4], ("2", "1"): [math.inf, 0.2]}
    results = sweep(tmp_path, curves)
    for path in (results.folder.run(i).metrics for i in range(3)):  # as a run writes it
        path.write_text(path.read_text().replace("NaN", "null").replace("Infinity", "null"))
    results = read_results(results.folder, results.plan, SweepState.read(results.folder))
    assert [row.values for row in results.results] == [None, (0.4,), (0.2,)]
    assert results.best is not None and results.best.job.index == 1
    assert [(dict(f.varied), f.seeds, f.jobs) for f in aggregate_seeds(results)] == [
        ({"optimizer.lr": "1"}, 1, 2),
        ({"optimizer.lr": "2"}, 1, 1),
    ]
    write_files(results)
    rows = list(csv.DictReader(results.folder.table.read_text().splitlines()))
    assert [(row["eval/accuracy"], row["eval/accuracy step"]) for row in rows] == [
        ("nan", "2"),
        ("0.4", "2"),
        ("0.2", "2"),
    ]
    first = json.loads(results.folder.results.read_text())["jobs"][0]
    assert first["scores"] == {"eval/accuracy": {"value": None, "step": 2}} and first["last"] == {"eval/accuracy": None}
    said = reports.ending_lines(results)
    assert said[2].split()[3:6] == ["done", "2/3", "nan"] and any("1 of 2" in line for line in said)
    best = sweep(tmp_path / "best", curves, replace(MAX, take="best"))
    assert best.best is not None and best.best.values == (0.9,), "its checkpoint is kept"


def test_only_a_job_that_is_done_can_win(tmp_path: Path) -> None:
    results = sweep(tmp_path, {("1", "1"): []})
    assert results.best is None
    assert "best     none" in "\n".join(reports.ending_lines(results))


def test_a_tie_is_said(tmp_path: Path) -> None:
    said = reports.ending_lines(
        sweep(tmp_path, {("1", "1"): [0.5], ("1", "2"): [0.5], ("2", "1"): [0.4], ("3", "1"): [0.5]})
    )
    assert "best     job 0  lr=1 seed=1  eval/accuracy 0.5 at step 1 (equal to 2 other jobs; this is the first)" in said
    same = sweep(tmp_path, {("1", "1"): [0.5], ("1", "2"): [0.5], ("2", "1"): []})
    assert "best     no difference: all 2 finished jobs have eval/accuracy 0.5" in reports.ending_lines(same)
    assert same.best is None
    said = reports.ending_lines(sweep(tmp_path, CURVES))
    assert "best     job 2  lr=2 seed=1  eval/accuracy 0.7 at step 2" in said


def test_seeds_are_folded_to_mean_and_interval(tmp_path: Path) -> None:
    found = aggregate_seeds(sweep(tmp_path, CURVES))
    assert [(dict(f.varied), f.seeds, f.means[0].value) for f in found] == [
        ({"optimizer.lr": "2"}, 1, 0.7),
        ({"optimizer.lr": "1"}, 2, 0.55),
        ({"optimizer.lr": "3"}, 1, 0.4),
    ]
    assert found[0].means[0].half_width is None
    assert found[1].means[0].half_width == pytest.approx(12.706 * 0.05)


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=60))
def test_the_mean_and_its_spread(values: list[float]) -> None:
    one = mean_with_interval(values)
    assert one.value == pytest.approx(statistics.fmean(values), abs=1e-9)
    assert one.half_width == pytest.approx(
        t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values)), abs=1e-9
    )


@pytest.mark.parametrize("degrees", [*range(1, 34), 60, 120, 1000])
def test_the_quantiles_are_students(degrees: int) -> None:
    """The density of Student's t between both ends holds 95 % (Simpson's rule)."""

    def density(t: float) -> float:
        log = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - math.log(degrees * math.pi) / 2
        return math.exp(log - (degrees + 1) / 2 * math.log1p(t * t / degrees))

    end, count = t_quantile(degrees), 2000
    ordinates = [density(end * i / count) for i in range(count + 1)]
    half = end / count / 3 * (ordinates[0] + ordinates[-1] + 4 * sum(ordinates[1:-1:2]) + 2 * sum(ordinates[2:-1:2]))
    assert 2 * half == pytest.approx(0.95, abs=5e-5 if degrees <= 30 else 4e-4)


def test_results_can_be_read_by_other_programs(tmp_path: Path) -> None:
    results = sweep(tmp_path, CURVES)
    write_files(results)
    rows = list(csv.DictReader(results.folder.table.read_text().splitlines()))
    found = [(r["job"], r["optimizer.lr"], r["seed"], r["state"], r["eval/accuracy"], r["best"]) for r in rows]
    assert found[1:3] == [("1", "1", "2", "done", "0.6", ""), ("2", "2", "1", "done", "0.7", "yes")]
    assert rows[3]["error"] == NASTY and rows[3]["exit_code"] == "1" and rows[3]["eval/accuracy"] == ""
    content = json.loads(results.folder.results.read_text())
    assert content["best"] == 2 and content["front"] == [2] and len(content["jobs"]) == 5
    assert content["rankings"] == [{"metric": "eval/accuracy", "mode": "max", "take": "last"}]
    assert content["jobs"][0]["last"] == {"eval/accuracy": 0.5}
    assert content["jobs"][2]["scores"] == {"eval/accuracy": {"value": 0.7, "step": 2}}
    assert content["jobs"][3]["scores"] == {"eval/accuracy": None}


SPEED = Ranking("perf/tokens_per_s", "max", "last", "sweep.metric")


def of_two(where: Path, points: list[tuple[float, float | None]]) -> Results:
    """A finished sweep with these values of eval/loss (less is better) and perf/tokens_per_s (more is better)."""
    folder = plans.create_sweep_folder("toy", where)
    jobs = [JobPlan(i, {"n": str(i)}, (f"n={i}",)) for i in range(len(points))]
    made = Plan("toy", (), {"steps": 1}, jobs, {}, (Ranking("eval/loss", "min", "last", "sweep.metric"), SPEED))
    plans.write_plan(folder, made)
    record = SweepState.create(folder, len(jobs))
    for i, (loss, speed) in enumerate(points):
        folder.run(i).root.mkdir()
        row = {"step": 1, "eval/loss": loss} | ({} if speed is None else {SPEED.metric: speed})
        folder.run(i).metrics.write_text(json.dumps(row) + "\n")
        record.update(i, state="done")
    return read_results(folder, made, record)


def test_several_metrics_have_a_front_and_no_winner(tmp_path: Path) -> None:
    results = of_two(tmp_path, [(0.5, 10), (0.4, 5), (0.6, 9), (0.4, 6), (0.3, 1), (0.1, None)])
    assert results.best is None and [row.job.index for row in results.pareto_front] == [4, 3, 0]
    write_files(results)
    content = json.loads(results.folder.results.read_text())
    assert (content["best"], content["front"]) == (None, [4, 3, 0])
    said = reports.ending_lines(results)
    assert "best     3 jobs of 6: no other is as good in all metrics and better in one (the Pareto front)" in said
    assert sum(line.startswith("again    run n=") for line in said) == 3
    write_page(results)
    page = results.folder.report.read_text()
    checked(page)
    # both charts of points, curves of one step; hollow points, the style
    assert page.count("<circle") == 5 + 5 + 11 and page.count("hollow") == 2 + 1


@pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine")
@pytest.mark.parametrize("theme", ["0", "1"], ids=["dark", "light"])
def test_a_browser_draws_the_front(tmp_path: Path, theme: str) -> None:
    results = of_two(tmp_path, [(0.5, 10), (0.4, 5), (0.6, 9)])
    write_page(results)
    figures = in_a_browser(results.folder.report, theme, tmp_path)
    assert [f.get("data-metric", "front") for f in figures][:3] == ["front", "front", "eval/loss"]


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(points=st.lists(st.tuples(st.integers(0, 4).map(float), st.integers(0, 4).map(float)), min_size=1, max_size=12))
def test_the_front_is_what_nobody_beats(points: list[tuple[float, float | None]], tmp_path: Path) -> None:
    front = {row.job.index for row in of_two(tmp_path, points).pareto_front}
    for i, (loss, speed) in enumerate(points):
        beaten = any(a <= loss and b >= speed and (a, b) != (loss, speed) for a, b in points)
        assert (i in front) == (not beaten and (loss, speed) not in points[:i])


def test_the_report_is_whole_and_harmless(tmp_path: Path) -> None:
    results = sweep(tmp_path, CURVES)
    write_page(results)
    page = results.folder.report.read_text()
    parser = checked(page)
    assert page.count("<polyline") == 4 + 1 and NASTY not in page  # and the interval of lr=1 over two seeds
    assert "eval/accuracy against optimizer.lr" in page and page.count('r="5"') == 3
    assert len([1 for tag, attrs in parser.seen if tag == "tr" and "data-key" in attrs]) == 5
    for word in ("Best: job 2", "Jobs that failed", "no job has started", "lr=2 seed=1"):
        assert word in page


def test_an_axis_without_numbers_has_a_line_instead_of_a_chart(tmp_path: Path) -> None:
    results = sweep(tmp_path, {("low", "1"): [0.9], ("high", "1"): [0.5]})
    write_page(results)
    page = results.folder.report.read_text()
    assert "optimizer.lr: no chart, because its values are not numbers" in page and "against optimizer.lr" not in page


def test_a_damaged_file_of_one_job_costs_no_other_its_results(tmp_path: Path) -> None:
    results = sweep(tmp_path, CURVES)
    for index in (0, 1):
        results.folder.run(index).spec.write_text("name: toy\n")
    results.folder.run(1).manifest.write_text("{")
    write_page(results)
    page = results.folder.report.read_text()
    assert "Best: job 2" in page and "001/manifest.json cannot be read" in page and "(job 1)" in page


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    results = sweep(tmp_path, CURVES)
    folder, again = plans.find_sweep(str(results.folder.root))
    assert again == results.plan and isinstance(folder, SweepFolder)


def test_short_names_stay_apart() -> None:
    assert plans.short_names(["optimizer.lr", "seed"]) == {"optimizer.lr": "lr", "seed": "seed"}
    assert plans.short_names(["data.path", "model.path"]) == {"data.path": "data.path", "model.path": "model.path"}
