"""What a sweep's results say: who wins, means over seeds, files that other programs read."""

from __future__ import annotations

import csv
import json
import math
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.sweep import plan as plans
from runner.sweep import words
from runner.sweep.page import write_page
from runner.sweep.plan import JobPlan, Plan, Ranking, SweepFolder
from runner.sweep.record import Record
from runner.sweep.results import T95, Results, fold, folds, gather, write_files
from tests.report.test_pages import NASTY, checked

MAX = Ranking("eval/accuracy", "max", "last", "sweep.metric")


def sweep(where: Path, curves: dict[tuple[str, str], list[float]], ranking: Ranking | None = MAX) -> Results:
    """A finished sweep over (lr, seed) with these curves of eval/accuracy; an empty one is a failed job."""
    folder = plans.create("toy", where)
    jobs = list(
        JobPlan(i, {"optimizer.lr": lr, "seed": seed}, (f"optimizer.lr={lr}", f"seed={seed}"))
        for i, (lr, seed) in enumerate(curves)
    )
    made = Plan("toy", ("seed=1,2",), {"steps": 3}, jobs, {}, ranking)
    plans.write(folder, made)
    record = Record.begin(folder, len(jobs))
    for i, values in enumerate(curves.values()):
        folder.run(i).root.mkdir()
        folder.run(i).metrics.write_text(
            "".join(json.dumps({"step": s, "eval/accuracy": v}) + "\n" for s, v in enumerate(values, 1))
        )
        record.change(i, **({"state": "done"} if values else {"state": "failed", "error": NASTY, "exit_code": 1}))
    return gather(folder, made, record)


CURVES = {
    ("1", "1"): [0.9, 0.5],
    ("1", "2"): [0.1, 0.6],
    ("2", "1"): [0.2, 0.7],
    ("2", "2"): [],
    ("3", "1"): [0.2, 0.4],
}


def test_the_last_value_wins_or_the_best_one(tmp_path: Path) -> None:
    results = sweep(tmp_path, CURVES)
    assert results.best is not None and (results.best.job.index, results.best.value, results.best.step_of_value) == (
        2,
        0.7,
        2,
    )
    results = sweep(tmp_path, CURVES, replace(MAX, take="best"))
    assert results.best is not None and (results.best.job.index, results.best.value, results.best.step_of_value) == (
        0,
        0.9,
        1,
    )
    results = sweep(tmp_path, CURVES, replace(MAX, mode="min"))
    assert results.best is not None and results.best.job.index == 4


def test_without_a_metric_the_first_usual_one_that_all_have(tmp_path: Path) -> None:
    results = sweep(tmp_path, CURVES, None)
    assert results.ranking is not None and (results.ranking.metric, results.ranking.mode) == ("eval/accuracy", "max")


def test_only_a_job_that_is_done_can_win(tmp_path: Path) -> None:
    results = sweep(tmp_path, {("1", "1"): []})
    assert results.best is None
    assert "best     none" in "\n".join(words.ending(results))


def test_seeds_are_folded_to_mean_and_interval(tmp_path: Path) -> None:
    found = folds(sweep(tmp_path, CURVES))
    assert [(dict(f.varied), f.mean) for f in found] == [
        ({"optimizer.lr": "2"}, 0.7),
        ({"optimizer.lr": "1"}, 0.55),
        ({"optimizer.lr": "3"}, 0.4),
    ]
    assert found[0].half_width is None and found[1].half_width == pytest.approx(12.706 * 0.05)


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=60))
def test_the_mean_and_its_spread(values: list[float]) -> None:
    one = fold({}, values)
    assert one.mean == pytest.approx(statistics.fmean(values), abs=1e-9)
    quantile = T95[len(values) - 2] if len(values) <= 31 else 1.96
    assert one.half_width == pytest.approx(quantile * statistics.stdev(values) / math.sqrt(len(values)), abs=1e-9)


@pytest.mark.parametrize("degrees", range(1, 31))
def test_the_quantiles_are_students(degrees: int) -> None:
    """The density of Student's t between both ends holds 95 % (Simpson's rule)."""

    def density(t: float) -> float:
        log = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - math.log(degrees * math.pi) / 2
        return math.exp(log - (degrees + 1) / 2 * math.log1p(t * t / degrees))

    end, count = T95[degrees - 1], 2000
    ordinates = [density(end * i / count) for i in range(count + 1)]
    half = end / count / 3 * (ordinates[0] + ordinates[-1] + 4 * sum(ordinates[1:-1:2]) + 2 * sum(ordinates[2:-1:2]))
    assert 2 * half == pytest.approx(0.95, abs=5e-5)


def test_results_can_be_read_by_other_programs(tmp_path: Path) -> None:
    results = sweep(tmp_path, CURVES)
    write_files(results)
    rows = list(csv.DictReader(results.folder.table.read_text().splitlines()))
    assert [(r["job"], r["optimizer.lr"], r["seed"], r["state"], r["value"]) for r in rows][1] == (
        "1",
        "1",
        "2",
        "done",
        "0.6",
    )
    assert rows[3]["error"] == NASTY and rows[3]["exit_code"] == "1" and rows[3]["value"] == ""
    content = json.loads(results.folder.results.read_text())
    assert content["best"] == 2 and content["metric"] == "eval/accuracy" and len(content["jobs"]) == 5
    assert content["jobs"][0]["last"] == {"eval/accuracy": 0.5}


def test_the_report_is_whole_and_harmless(tmp_path: Path) -> None:
    results = sweep(tmp_path, CURVES)
    write_page(results)
    page = results.folder.report.read_text()
    parser = checked(page)
    assert page.count("<polyline") == 4 and NASTY not in page
    assert len([1 for tag, attrs in parser.seen if tag == "tr" and "data-key" in attrs]) == 5
    for word in ("Best: job 2", "What did not end well", "no job has begun", "lr=2 seed=1"):
        assert word in page


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    results = sweep(tmp_path, CURVES)
    folder, again = plans.find(str(results.folder.root))
    assert again == results.plan and isinstance(folder, SweepFolder)


def test_short_names_stay_apart() -> None:
    assert plans.short_names(["optimizer.lr", "seed"]) == {"optimizer.lr": "lr", "seed": "seed"}
    assert plans.short_names(["data.path", "model.path"]) == {"data.path": "data.path", "model.path": "model.path"}
