"""Reports of runs: whole, self-contained, harmless, and drawn by a real browser where there is one."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from runner.core.errors import EnvironmentProblem
from runner.run_dir.folder import RunFolder
from runner.tools.report import diff
from runner.tools.report.page import write_page
from runner.tools.report.run_facts import Series, read_metrics, read_run

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
VOID = {"meta", "link", "input"}
NASTY = "</script><script>alert(1)</script><img src=http://evil/x>"


class Strict(HTMLParser):
    """Every tag that opens closes, and nothing is fetched or run but the page's own."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, tag


def checked(page: str) -> Strict:
    parser = Strict()
    parser.feed(page)
    assert parser.open == []
    tags = [tag for tag, _ in parser.seen]
    assert tags.count("script") == 1 and "img" not in tags and "iframe" not in tags
    assert not [a for _, attrs in parser.seen for a in attrs if a.startswith("on")]
    for tag, attrs in parser.seen:
        assert "src" not in attrs and (tag != "link" or attrs.get("href") == "data:,")
    return parser


def a_run(root: Path, seed: int = 1, name: str = "mine", **more: object) -> RunFolder:
    """A run folder as a run leaves it, in miniature."""
    root.mkdir()
    folder = RunFolder(root)
    spec = {"name": name, "seed": seed, "steps": 3, "optimizer": {"name": "adamw", "lr": 0.1}, "checkpoint": {}} | more
    folder.spec.write_text(yaml.safe_dump(spec))
    folder.overrides.write_text(yaml.safe_dump({"typed": ["seed=1"], "set_by": {"seed": "command line"}}))
    folder.status.write_text(json.dumps({"state": "done", "exit_code": 0}))
    manifest = {
        "code": {"commit": f"c{seed}", "dirty": False},
        "packages": {"torch": "2.1"},
        "device": {"device": "cpu"},
    }
    folder.manifest.write_text(json.dumps(manifest))
    rows = [{"step": s, "train/loss": 2.0 / s * seed, "eval/loss": None, "time/update_s": 0.5} for s in (1, 2, 3)]
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 4, "tr')
    folder.samples.write_text(json.dumps({"step": 3, "prompt": NASTY, "answer": "ok", "reward": 0.5}) + "\n")
    return folder


def test_series_leave_out_what_is_no_number_and_a_torn_line(tmp_path: Path) -> None:
    found = read_metrics(a_run(tmp_path / "a").metrics)
    assert found["train/loss"].points == ((1, 2.0), (2, 1.0), (3, 2.0 / 3)) and "eval/loss" not in found
    assert found["train/loss"].best("min") == (3, 2.0 / 3) and found["train/loss"].best("max") == (1, 2.0)
    assert read_metrics(tmp_path / "nowhere") == {}
    (tmp_path / "damaged.jsonl").write_text('{"step": null}\n{"step": "x"}\n[1]\n{"step": 5, "train/loss": 1.0}\n')
    assert read_metrics(tmp_path / "damaged.jsonl")["train/loss"].points == ((5, 1.0),)


def test_what_is_not_finite_at_the_end_is_said(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "a")
    with folder.metrics.open("w") as file:
        file.write('{"step": 1, "eval/loss": 2.0}\n{"step": 2, "eval/loss": null}\n')
    step, value = read_metrics(folder.metrics)["eval/loss"].last
    assert step == 2 and math.isnan(value)
    write_page(folder, tmp_path / "r.html")
    assert "eval/loss  2 → nan" in (tmp_path / "r.html").read_text()


def test_a_damaged_sample_is_left_out_and_one_with_a_line_separator_is_whole(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "a")
    with folder.samples.open("a") as file:
        file.write("\0\0\n3\n" + json.dumps({"step": 3, "prompt": "p", "answer": "one\u2028two"}, ensure_ascii=False))
        file.write("\n")
    write_page(folder, tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert "Newest samples" in page and "one\u2028two" in page


def test_an_episode_is_shown_as_a_conversation_with_calls_and_results(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "a")
    call = {"type": "function", "function": {"name": "buy", "arguments": {"item": "tea"}}}
    turns = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "2 coins"}]
    with folder.samples.open("a") as file:
        file.write(json.dumps({"step": 3, "prompt": "p", "turns": turns, "answer": "bought"}) + "\n")
    write_page(folder, tmp_path / "r.html")
    assert "assistant: buy({&quot;item&quot;: &quot;tea&quot;})\ntool: 2 coins" in (tmp_path / "r.html").read_text()


def test_a_runs_report_is_whole_and_harmless(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "a", name="<b>mine</b>")
    write_page(folder, tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    checked(page)
    assert "<h2>Total time, all steps</h2>" in page
    for word in ("&lt;b&gt;mine&lt;/b&gt;", "train/loss  2 → 0.6667", "command line", "torch", "c1", "&lt;/script&gt;"):
        assert word in page, word


def test_the_numbers_of_a_harness_have_its_name(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "a")
    row = {"step": None, "suite": "lm_eval", "created": "2026-11-25T10:00:00", "values": {"gsm8k/exact_match": 0.5}}
    folder.evaluations.write_text(json.dumps(row) + "\n")
    write_page(folder, tmp_path / "r.html")
    assert "<th>lm_eval, 2026-11-25 10:00</th>" in (tmp_path / "r.html").read_text()


def test_a_report_of_a_run_that_has_hardly_begun(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    folder = RunFolder(tmp_path / "a")
    with pytest.raises(EnvironmentProblem, match="cannot be read"):
        read_run(folder)
    folder.spec.write_text("name: x\nsteps: 3\n")
    write_page(folder, tmp_path / "r.html")
    checked((tmp_path / "r.html").read_text())


def test_secrets_of_a_spec_are_masked(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "a", reward={"url": "https://me:hunter22pass@host/score"})
    write_page(folder, tmp_path / "r.html")
    assert "hunter22pass" not in (tmp_path / "r.html").read_text() + str(read_run(folder).spec)


def test_a_diff_says_only_what_differs(tmp_path: Path) -> None:
    a, b = a_run(tmp_path / "a"), a_run(tmp_path / "b", seed=2)
    found = {(d.where, d.name): (d.first, d.second) for d in diff.differences(read_run(a), read_run(b))}
    assert found == {("config", "seed"): ("1", "2"), ("code", "commit"): ("c1", "c2")}
    said = "\n".join(diff.diff_lines(a, b))
    assert "+0.6667" in said and "optimizer" not in said
    assert diff.differences(read_run(a), read_run(a)) == []
    assert "are the same" in "\n".join(diff.diff_lines(a, a))
    diff.write_page(a, b, tmp_path / "d.html")
    page = (tmp_path / "d.html").read_text()
    checked(page)
    assert page.count("<polyline") == 4  # two metrics of two runs


def test_a_diff_compares_runs_of_other_lengths_at_the_newest_step_of_both(tmp_path: Path) -> None:
    a, b = long_run(tmp_path / "a"), a_run(tmp_path / "b")  # the loss of the first is 25 at step 3
    points: list[dict[str, float]] = [{"step": 1, "train/loss": 1}, {"step": 3, "train/loss": 24}]
    b.metrics.write_text("".join(json.dumps(one) + "\n" for one in (*points, {"step": 500, "policy/entropy": 2})))
    rows = [line.split() for line in diff.diff_lines(a, b)]
    [loss], [entropy] = ([row for row in rows if row[:1] == [name]] for name in ("train/loss", "policy/entropy"))
    assert (loss[1], loss[2], loss[4], loss[-1]) == ("3", "25", "24", "-1")
    assert entropy[1] == entropy[-1] == "–" and "199)" in entropy and "500)" in entropy
    a.metrics.write_text("".join(json.dumps({"step": s, "train/loss": 1 if s < 3 else None}) + "\n" for s in range(9)))
    [loss] = (row for row in map(str.split, diff.diff_lines(a, b)) if row[:1] == ["train/loss"])
    assert (loss[1], loss[2], loss[-1]) == ("3", "nan", "+nan"), "both measured step 3, one of them not a number"
    assert "newest step that both measured" in "\n".join(diff.diff_lines(a, b))
    assert "newest step that both measured" not in "\n".join(diff.diff_lines(a, a))


def long_run(root: Path, metrics: int = 0) -> RunFolder:
    """200 steps of an RL run with `metrics` more of them."""
    folder = a_run(root)
    names = ["train/loss", "rollout/length", "policy/entropy", "mismatch/kl", *(f"more/{i:03}" for i in range(metrics))]
    rows = [{"step": step, **{name: 100 / (step + 1) for name in names}} for step in range(200)]
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sample = {"prompt": "p", "answer": "a"}
    samples = [{**sample, "step": step, "reward": float(step > 3), "version": step} for step in range(8)]
    samples += [{**sample, "step": step, "reward": 2.0} for step in (0, 100)]  # of evaluations
    folder.samples.write_text("".join(json.dumps(row) + "\n" for row in samples))
    return folder


def test_charts_stand_by_prefix_with_smoothed_curves_a_log_axis_and_the_health_panel(tmp_path: Path) -> None:
    write_page(long_run(tmp_path / "a"), tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    parser = checked(page)
    assert [part.split("<")[0] for part in page.split("<h3>")[1:]] == ["train", "health"]
    figures = [attrs["data-metric"] for tag, attrs in parser.seen if tag == "figure" and "data-metric" in attrs]
    assert figures == ["train/loss", "policy/entropy", "mismatch/kl", "rollout/length"]
    kinds = [attrs["class"] for tag, attrs in parser.seen if tag == "polyline"]
    assert kinds == ["curve raw", "curve smooth"] * 2 * 4  # both axes of four metrics
    bars = [attrs for tag, attrs in parser.seen if tag == "rect"]
    assert "Rewards of logged rollouts" in page and len(bars) == 2, "held-out completions are not among them"
    assert "steps up to 3.5: 4" in page and "steps after 3.5: 4" in page


def test_a_page_stays_below_500_kb_and_names_what_it_leaves_out(tmp_path: Path) -> None:
    write_page(long_run(tmp_path / "a", metrics=600), tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert len(page.encode()) < 500_000 and "544 more metrics are in metrics.jsonl" in page


def test_long_texts_are_cut_with_a_mark_and_control_characters_are_escaped(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "a", name="name\x1b[2J" + "n" * 2_000_000)
    text = "\x00\x1b]0;owned\x07\x9b" + "<&'" * 350_000
    rows = [{"step": step, "prompt": text, "answer": text, "reward": 1.0} for step in (1, 2)]
    folder.samples.write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_page(folder, tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    checked(page)
    assert len(page.encode()) < 500_000 and page.count(f"… ({len(text)} characters)") >= 4
    assert r"\x00\x1b]0;owned\x07\x9b&lt;" in page and not set(map(chr, (*range(9), *range(11, 32)))) & set(page)


def test_smoothing_is_the_debiased_mean_of_the_past() -> None:
    found = Series(((0, 1.0), (1, 1.0), (2, 4.0))).smooth(0.5).points
    assert [value for _, value in found] == pytest.approx([1.0, 1.0, (0.25 + 0.5 + 4 * 1) / 1.75])


BROWSER = next((path for name in BROWSERS if (path := shutil.which(name))), None)


def test_a_diff_leaves_out_what_depends_on_the_machine(tmp_path: Path) -> None:
    a, b = a_run(tmp_path / "a"), a_run(tmp_path / "b")
    for folder, seconds in ((a, 0.1), (b, 0.2)):
        row = {"step": 1, "weight_sync/send_s": seconds, "time/update_s": seconds, "weight_sync/bytes": 8}
        folder.metrics.write_text(json.dumps(row) + "\n")
    said = "\n".join(diff.diff_lines(a, b))
    assert "weight_sync/bytes" in said and "weight_sync/send_s" not in said and "time/update_s" not in said


def in_a_browser(page: Path, theme: str, home: Path) -> list[dict[str, str | None]]:
    """The figures of a page as a phone's browser, dark (0) or light (1), has them; it must have no complaint."""
    assert BROWSER is not None
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--window-size=400,900"]
    done = subprocess.run(
        [BROWSER, *options, f"--blink-settings=preferredColorScheme={theme}", "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=250,
        env={"PATH": "/usr/bin:/bin", "HOME": str(home)},
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    return [attrs for tag, attrs in checked(done.stdout).seen if tag == "figure"]


@pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine")
@pytest.mark.parametrize("theme", ["0", "1"], ids=["dark", "light"])
def test_a_browser_draws_it_and_has_no_complaint(tmp_path: Path, theme: str) -> None:
    write_page(a_run(tmp_path / "a"), tmp_path / "r.html")
    figures = in_a_browser(tmp_path / "r.html", theme, tmp_path)
    assert [f["data-metric"] for f in figures] == ["train/loss", "time/update_s"]
