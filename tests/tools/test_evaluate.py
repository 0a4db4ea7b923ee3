"""`run eval`: the numbers of training, answers that are kept, comparisons question by question, and what shows them."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.core.auto_choices import Decisions
from runner.core.errors import DataError
from runner.inference.answer_journal import AnswerJournal, JournaledSampler
from runner.inference.torch_engine import TorchEngine
from runner.interfaces import Request, Rollout
from runner.tools.evaluate import _tensors, paired_difference, question_scores
from runner.trainer.evaluation_metrics import t_quantile
from runner.weight_sync.weight_checksum import weights_digest
from tests import command
from tests.model.zoo import causal
from tests.small import JUDGED


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which one small run was made."""
    cwd = tmp_path_factory.mktemp("work")
    command.run(*(word for word in JUDGED if word != "steps=6"), "steps=2", cwd=cwd)
    return cwd


def results(cwd: Path) -> dict[str, Any]:
    newest = max((cwd / "outputs/eval").glob("2*/results.json"), key=lambda path: path.stat().st_mtime_ns)
    return dict(json.loads(newest.read_text()))


def test_a_runs_own_held_out_rows_have_the_numbers_of_training(work: Path) -> None:
    out = command.run("eval", "latest", cwd=work)
    last = json.loads((work / "outputs/latest/metrics.jsonl").read_text().splitlines()[-1])
    [values] = results(work)["sets"]["held_out"]["values"].values()
    assert values["exact_match"] == last["eval/exact_match"] and "8 new answers, 0 known from before" in out


def test_models_are_compared_and_run_report_and_run_diff_show_it(work: Path) -> None:
    first = (work / "outputs/latest").resolve()
    command.run("--spec", str(first), "seed=1", cwd=work)
    words = [
        "eval",
        str(first),
        "latest",
        "latest/export",
        "+evaluation=[sort,format]",
        "--limit",
        "6",
        "--samples",
        "2",
    ]
    words = [word.replace("latest/export", "outputs/latest/export") for word in words]
    out = command.run(*words, cwd=work)
    assert out.count("12 new answers, 0 known") == 4, "two models, two sets"
    assert out.count("0 new answers, 12 known") == 2, "an export has the weights of its run"
    assert "pass@2" in out and f" − {first.name}" in out
    record = results(work)["sets"]["format"]
    assert record["limit"] == 6 and record["data"]["task"] == "format"
    assert all(one["questions"] == 6 and "difference_ci_low" in one for one in record["differences"].values())
    again = command.run(*words[:-1], "3", cwd=work)
    assert again.count("6 new answers, 12 known") == 4, "the third answer to each question"
    page = (max((work / "outputs/eval").glob("2*")) / "report.html").read_text()
    assert "<h2>sort</h2>" in page and "reward/mean" in page
    command.run("report", "latest", cwd=work)
    assert "sort/mean@3" in (work / "outputs/latest/report.html").read_text()
    assert "format/reward/mean" in command.run("diff", str(first), "latest", cwd=work)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["latest", "latest"], "latest is listed twice"),
        (["latest", "optimizer.lr=1"], "run eval: optimizer.lr=1: there are +evaluation=[…]"),
        (["latest", "+evaluation=gsm"], "no evaluation named 'gsm'; did you mean 'gsm8k'?"),
        (["outputs/latest/export"], "no model is a run"),
        (["nowhere"], "nowhere: no such folder"),
        (
            ["latest", "+evaluation.sets.mc={choices: options}", "--samples", "4"],
            "evaluation.sets.mc, a multiple choice",
        ),
    ],
)
def test_mistakes_are_answered_before_a_model_is_loaded(work: Path, words: list[str], message: str) -> None:
    assert message in command.run("eval", *words, cwd=work, code=2)


class Enough(Exception):
    """The process is killed here."""


def sampler(path: Path, temperature: float, most: int) -> JournaledSampler:
    """One that is killed after so many new answers."""
    model, left = causal("llama"), [most]

    def count() -> None:
        left[0] -= 1
        if left[0] == 0:
            raise Enough

    engine = TorchEngine(model, decide=Decisions(), max_num_seqs=3)
    return JournaledSampler(engine, model.tokenizer, AnswerJournal(path), temperature, 8, count)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_evaluation_that_was_killed_asks_only_for_the_rest(tmp_path: Path, temperature: float) -> None:
    requests = [Request((1, 2, 3 + at // 2), 100 + at, 8, at) for at in range(10)]
    whole = sampler(tmp_path / "whole.jsonl", temperature, 99).sample(requests)
    path = tmp_path / "killed.jsonl"
    with pytest.raises(Enough):
        sampler(path, temperature, 4).sample(requests)
    assert len(path.read_text().splitlines()) == 4
    with path.open("a") as file:
        file.write('{"key": "torn')
    rest = sampler(path, temperature, 99)
    ids = [one.ids for one in rest.sample(requests)]
    assert ids == [one.ids for one in whole] and rest.journal.num_known >= 4
    lines = path.read_text().splitlines()
    assert len(lines) == 1 + (10 if temperature else 5), "a greedy answer does not depend on the seed"
    known = sampler(path, temperature, 1)  # a new answer would end it
    assert [one.ids for one in known.sample(requests)] == ids


def test_a_request_that_is_refused_cancels_those_before_it(tmp_path: Path) -> None:
    asking = sampler(tmp_path / "a.jsonl", 0.0, 99)
    with pytest.raises(DataError, match="a completion needs at least one token"):
        asking.sample([Request((1, 2, 3), 100, 8, 0), Request((1, 2, 4), 100, 0, 1)])
    assert asking.engine.is_idle
    assert asking.sample([Request((1, 2, 3), 100, 8, 0)])[0].ids


def test_a_journal_keeps_answers_as_they_were(tmp_path: Path) -> None:
    journal = AnswerJournal(tmp_path / "a.jsonl")
    journal.add("k", Rollout((1, 2), (0.0, 0.0), None, 0, "length"), {"text": "ä"})
    found = AnswerJournal(tmp_path / "a.jsonl").find("k")
    assert found is not None and (found.ids, found.finish) == ((1, 2), "length")


def test_answers_of_other_scales_and_positions_are_not_those_of_the_same_weights() -> None:
    class Layer(torch.nn.Linear):
        scaling: dict[str, float]

    layer = Layer(2, 2)
    layer.register_buffer("inv_freq", torch.ones(2), persistent=False)
    layer.scaling = {"default": 1.0}
    digests = [weights_digest(_tensors(layer))]
    layer.scaling = {"default": 2.0}
    digests.append(weights_digest(_tensors(layer)))
    layer.inv_freq = torch.zeros(2)
    digests.append(weights_digest(_tensors(layer)))
    assert len(set(digests)) == 3


def test_differences_are_paired_by_question_and_clustered() -> None:
    samples = [{"reward": r} for r in (1.0, 0.0, None, 0.0, 1.0, None)]  # two answers to each of three questions
    assert question_scores(samples, 3) == [0.5, 0.5, None]
    assert question_scores([{"exact": True}, {"answer": "not comparable"}], 2) == [1.0, None]
    a, b = [0.0, 0.5, 1.0, 0.0], [1.0, 0.5, 1.0, None]
    found = paired_difference(a, b)
    assert found["difference"] == pytest.approx(1 / 3) and found["questions"] == 3
    half = t_quantile(2) * statistics.stdev([1.0, 0.0, 0.0]) / 3**0.5
    assert found["difference_ci_high"] == pytest.approx(1 / 3 + half)
    assert paired_difference(a, b[:2]) == {"questions": 0.0}
