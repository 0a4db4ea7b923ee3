"""The grid of held-out answers, and intervals around curves."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from runner.data.demo_shapes import draw
from runner.run_dir.folder import RunFolder
from runner.tools.report import diff
from runner.tools.report.page import write_page
from runner.tools.report.run_facts import read_rows
from runner.tools.report.samples_grid import evaluated_samples, samples_grid, spread
from tests.tools.report.test_pages import NASTY, a_run, checked


def line(step: int, prompt: str, answer: str, **more: object) -> str:
    return json.dumps({"step": step, "prompt": prompt, "answer": answer, **more}) + "\n"


def cells(html: str) -> list[list[str]]:
    """The texts of each row's cells."""
    rows = re.findall(r"<tr>(.*?)</tr>", html, re.DOTALL)
    return [[re.sub("<[^>]*>", "|", one) for one in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row)] for row in rows]


def test_a_row_is_a_question_and_a_column_an_evaluation(tmp_path: Path) -> None:
    rows = [
        line(0, "2+2", "5", expected="4", exact=False, reward=0.0, sample=0),
        line(0, "2+2", "second sample", expected="4", reward=0.0, sample=1),
        line(3, "2+2", "a rollout", reward=1.0, version=2),
        line(10, "2+2", "4", expected="4", exact=True, reward=1.0, turns=[{"content": "calc 2+2"}], sample=0),
        line(10, "3+3", "6", expected="6", exact=True, set="hard"),
        line(10, "x", 'says "version"'),
        "damaged\n",
    ]
    (tmp_path / "samples.jsonl").write_text("".join(rows))
    parts = samples_grid(evaluated_samples(list(read_rows(tmp_path / "samples.jsonl"))))
    assert [part for part in parts if part.startswith("<h2>")] == [
        "<h2>Held-out completions</h2>",
        "<h2>Held-out completions: hard</h2>",
    ]
    own, hard = (cells(part) for part in parts if "<table" in part)
    assert own == [
        ["question", "step 0", "step 10"],
        ["2+2|expected 4|", "5|reward 0|", "calc 2+2 → 4|reward 1|"],
        ["x", "", "says &quot;version&quot;||"],
    ]
    assert hard[1] == ["3+3|expected 6|", "6||"]


def test_the_first_and_the_last_evaluation_are_among_those_shown_and_the_rest_is_counted() -> None:
    rows = [{"step": step, "prompt": f"q{q}", "answer": "a"} for step in range(0, 90, 10) for q in range(10)]
    parts = samples_grid(evaluated_samples(rows))
    assert cells(parts[1])[0] == ["question", *(f"step {n}" for n in spread(range(0, 90, 10), 6))]
    assert spread(range(0, 90, 10), 6)[::5] == [0, 80]
    assert "2 of 10 questions are in samples.jsonl only; 3 of 9 evaluations are in samples.jsonl only" in parts[2]


def test_nothing_is_cut_without_a_mark_and_nothing_runs() -> None:
    [_, table] = samples_grid(evaluated_samples([{"step": 0, "prompt": NASTY, "answer": "a" * 500}]))
    assert "a" * 400 + "… (500 characters)" in table and "<script" not in table and "<img" not in table


def test_the_page_of_two_runs_has_their_intervals_and_what_was_evaluated_afterwards(tmp_path: Path) -> None:
    folders = [a_run(tmp_path / "a"), a_run(tmp_path / "b", seed=2)]
    for at, folder in enumerate(folders):
        rows = [{"step": n, "eval/x": 0.5, "eval/x_ci_low": 0.3, "eval/x_ci_high": 0.8} for n in range(3)]
        folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
        values = {"sort/mean@1": at / 4, "sort/mean@1_ci_low": 0.0, "sort/mean@1_ci_high": 1.0}
        write_evaluations(folder, evaluation(values, 3, questions=6))
    diff.write_page(*folders, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    seen = checked(page).seen
    assert [attrs["data-metric"] for tag, attrs in seen if tag == "figure"] == ["eval/x"]
    assert len([tag for tag, _ in seen if tag == "polygon"]) == 2
    assert "<td>sort/mean@1</td><td>0 (0..1)</td><td>0.25 (0..1)</td><td>+0.25</td>" in page
    assert not [line for line in diff.diff_lines(*folders) if "_ci_" in line]


def evaluation(values: dict[str, float], step: int, **options: Any) -> dict[str, Any]:
    """A record of `run eval`; without options, one of the time when it had none."""
    sets = {"sets": {"sort": options}} if options else {}
    return {"step": step, "created": "2026-11-25T10:00", "values": values, **sets}


def write_evaluations(folder: RunFolder, *records: dict[str, Any]) -> None:
    folder.evaluations.write_text("".join(json.dumps(one) + "\n" for one in records))


def test_evaluations_of_other_questions_steps_or_samples_are_not_subtracted(tmp_path: Path) -> None:
    folders = [a_run(tmp_path / "a"), a_run(tmp_path / "b", seed=2)]

    def rows(*records: dict[str, Any]) -> list[list[str]]:
        write_evaluations(folders[1], *records)
        lines = [re.split(r"\s{2,}", line.rstrip()) for line in diff.diff_lines(*folders)]
        return [line for line in lines if line[0].startswith("sort")]

    own = {"sort/exact_match": 0.5, "sort/pass@2": 0.75}
    write_evaluations(folders[0], evaluation(own, 3, questions=6, samples=2))
    same = {"sort/exact_match": 0.25, "sort/pass@2": 0.25}
    like = evaluation(same, 3, questions=6, samples=2)
    assert rows(like) == [["sort/exact_match", "0.5", "0.25", "-0.25"], ["sort/pass@2", "0.75", "0.25", "-0.5"]]
    step, match, _ = rows(evaluation(same, 5, questions=6, samples=2))
    assert (step, match[-1]) == (["sort: step", "3", "5"], "-0.25"), "another step is said"
    newer = evaluation({"sort/exact_match": 1.0}, 3, questions=64, samples=2)
    assert rows(like, newer) == [["sort: questions", "6", "64"], ["sort/exact_match", "0.5", "1", diff.ABSENT]]
    unknown, match, _ = rows(evaluation(same, 3))
    assert unknown == ["sort: questions and options", "recorded", "not recorded"] and match[-1] == diff.ABSENT


@pytest.mark.parametrize("steps", [1, 3])
def test_an_interval_is_an_area_around_its_curve_and_no_curve_of_its_own(tmp_path: Path, steps: int) -> None:
    folder = a_run(tmp_path / "run")
    name = "eval/pass@4"
    rows = [{"step": n, name: 0.5, f"{name}_ci_low": 0.3, f"{name}_ci_high": 0.8} for n in range(steps)]
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder.samples.write_text(line(0, "2+2", "4", expected="4"))
    write_page(folder, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    seen = checked(page).seen
    assert [attrs["data-metric"] for tag, attrs in seen if tag == "figure"] == [name]
    [points] = [str(attrs["points"]) for tag, attrs in seen if tag == "polygon"]
    heights = [float(one.partition(",")[2]) for one in points.split()]
    assert len(heights) == 2 * steps and min(heights) < max(heights)
    assert "Held-out completions" in page


def test_questions_with_other_images_are_other_questions_and_show_them_small(tmp_path: Path) -> None:
    large = tmp_path / "large.png"
    Image.effect_noise((900, 700), 90).convert("RGB").save(large)
    inline = f"data:image/*;base64,{base64.b64encode(draw(0)).decode()}"
    images = {"1": [str(large)], "2": [inline], "3": [f"{tmp_path}/<script>.png"], "4": [str(large)] * 6}
    rows = [json.loads(line(0, "what?", answer, images=some)) for answer, some in images.items()]
    [_, table] = samples_grid(rows)
    assert [row[1] for row in cells(table)[1:]] == [f"{answer}||" for answer in images]
    sources = re.findall('src="data:image/jpeg;base64,([^"]*)"', table)
    sizes = [Image.open(io.BytesIO(base64.b64decode(one))).size for one in sources]
    assert sizes == [(96, 75), (24, 24), *[(96, 75)] * 4] and max(map(len, sources)) < 16000
    assert "&lt;script&gt;.png cannot be shown" in table and "<script>" not in table
    assert "and 2 more images" in table
