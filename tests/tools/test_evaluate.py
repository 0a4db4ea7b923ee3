"""`run eval`: the numbers of training, answers that are kept, comparisons question by question, and what shows them."""

from __future__ import annotations

import json
import re
import shutil
import statistics
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import yaml

from runner.build import build_tokenizer
from runner.build.data import build_data
from runner.cli.evaluate import _first_run_spec, pop_run_set_options
from runner.cli.job_builder import compose_job, draft
from runner.core.auto_choices import Decisions
from runner.core.errors import DataError, SecurityError, SpecError
from runner.inference.answer_journal import AnswerJournal, JournaledSampler
from runner.inference.model_source import ModelSource, parse_source, resolve_model_path
from runner.inference.torch_engine import TorchEngine
from runner.interfaces import Request, Rollout, TokenizedExample
from runner.launch.run_records import write_spec
from runner.run_dir.folder import RunFolder
from runner.spec.evaluation import EvaluationConfig
from runner.spec.registry import default_registry
from runner.tools.evaluate import (
    SetResult,
    _item_logprobs,
    _tensors,
    append_evaluation,
    paired_difference,
    question_scores,
    set_definition,
    sets_of_run,
    unique_keys,
)
from runner.trainer.evaluation_metrics import t_quantile
from runner.trainer.evaluator import question_loss, score_items
from runner.trainer.reference_model import FrozenModel
from runner.weight_sync.weight_checksum import weights_digest
from tests import command
from tests.inference.scripted import serve
from tests.model.zoo import CPU, causal, rows
from tests.small import TINY


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which one small run was made, long enough to answer with digits."""
    cwd = tmp_path_factory.mktemp("work")
    steps = ["steps=40", "evaluation.every=40", "checkpoint.every=40", "schedule=constant", "optimizer.lr=0.01"]
    command.run(*TINY, *steps, "evaluation.max_new_tokens=6", cwd=cwd)
    return cwd


def results(cwd: Path) -> dict[str, Any]:
    newest = max((cwd / "outputs/eval").glob("2*/results.json"), key=lambda path: path.stat().st_mtime_ns)
    return dict(json.loads(newest.read_text()))


def test_a_runs_own_held_out_rows_have_the_numbers_of_training(work: Path) -> None:
    out = command.run("eval", "latest", cwd=work)
    last = json.loads((work / "outputs/latest/metrics.jsonl").read_text().splitlines()[-1])
    [values] = results(work)["sets"]["held_out"]["values"].values()
    assert values["exact_match"] == last["eval/exact_match"] and "8 new completions, 0 cached" in out


def test_rows_with_branches_have_the_loss_of_training() -> None:
    """A branch follows the beginning that it shares, not the branch before it."""
    model, (start, first, second, third) = causal("qwen2"), rows((5, 3, 4, 2))
    ids = (*start, *first, *second, *third)
    items = [
        TokenizedExample(ids, (*[0.0] * 5, *[1.0] * 9), branches=(5, 8, 12)),
        TokenizedExample(ids, (0.0, *[1.0] * 13)),
    ]
    trained = question_loss(items, partial(score_items, FrozenModel(model, 10**6, CPU)), 2)
    engine = TorchEngine(model, decide=Decisions())
    found = question_loss(items, lambda part: [_item_logprobs(item, engine) for item in part], 2)
    engine.close()
    assert found == pytest.approx(trained, rel=1e-5) and "loss_ci_low" in found


def test_a_run_that_held_nothing_out_is_told_to_name_sets() -> None:
    with pytest.raises(SpecError, match=r"type '\+evaluation=\[gsm8k\]', or '\+evaluation\.sets\.NAME=\{data: "):
        sets_of_run(compose_job(["model=tiny", "data=file", "data.path=a.jsonl", "steps=2", "evaluation.every=0"]).spec)


def test_a_set_is_defined_by_the_options_of_its_reward() -> None:
    found = []
    for tolerance in (0.1, 0.1, 1.0):
        word = f"evaluation.sets.a={{data: {{name: demo}}, reward: {{name: numeric, tolerance: {tolerance}}}}}"
        [one] = compose_job([word]).spec.evaluation.decoded_sets()
        found.append(set_definition(one, SetResult({}, {}, []))["reward"])
    assert found[0] == found[1] != found[2] and found[0].startswith("numeric (")


def test_held_out_preferences_of_files_are_left_out_beside_named_sets(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=tiny", "data=file", "data.path=a.jsonl", "data.holdout=0.5", "steps=2", "evaluation.every=1"]
    for algorithm in ("dpo", "kto"):
        job = compose_job([*words, f"algorithm={algorithm}", "+evaluation=[sort]"])
        assert [one.name for one in sets_of_run(job.spec)] == ["sort"]
        assert f"held_out: left out: held-out rows of algorithm={algorithm} have no" in capsys.readouterr().err
        with pytest.raises(SpecError, match=r"have no expected answer, only a loss; type '\+evaluation=\[gsm8k\]'"):
            sets_of_run(compose_job([*words, f"algorithm={algorithm}"]).spec)
    assert [one.name for one in sets_of_run(compose_job(["model=tiny", "algorithm=dpo"]).spec)] == ["held_out"]


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
    assert out.count("12 new completions, 0 cached") == 4, "two models, two sets"
    assert out.count("0 new completions, 12 cached") == 2, "an export has the weights of its run"
    assert "pass@2" in out and f" − {first.name}" in out
    record = results(work)["sets"]["format"]
    assert record["limit"] == 6 and record["data"]["task"] == "format"
    assert all(one["questions"] == 6 and "difference_ci_low" in one for one in record["differences"].values())
    measured = json.loads((work / "outputs/latest/evaluations.jsonl").read_text().splitlines()[-1])["sets"]["format"]
    assert (measured["questions"], measured["samples"]) == (6, 2) and measured["reward"].startswith("exact (")
    again = command.run(*words[:-1], "3", cwd=work)
    assert again.count("6 new completions, 12 cached") == 4, "the third answer to each question"
    page = (max((work / "outputs/eval").glob("2*")) / "report.html").read_text()
    assert "<h2>sort</h2>" in page and "reward/mean" in page
    command.run("report", "latest", cwd=work)
    assert "sort/mean@3" in (work / "outputs/latest/report.html").read_text()
    assert "format/reward/mean" in command.run("diff", str(first), "latest", cwd=work)
    command.run("eval", "latest", "+evaluation=[format]", "--limit", "4", cwd=work)
    [row] = re.findall("^format: questions .*$", command.run("diff", str(first), "latest", cwd=work), re.MULTILINE)
    assert row.split() == ["format:", "questions", "6", "4"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["latest", "latest"], "latest is listed twice"),
        (["latest", "optimizer.lr=1"], "run eval: optimizer.lr=1 is not an option of it; there are +evaluation=[…]"),
        (["latest", "evaluation.every=1"], "evaluation.every=1 changes nothing: it is an option of training"),
        (
            ["latest", "+evaluation=[sort]", "evaluation.samples=4"],
            "evaluation.samples=4 changes nothing: it applies only to a run's held-out rows; for a set, type "
            "evaluation.sets.sort.samples=…",
        ),
        (["latest", "+evaluation=gsm"], "no evaluation named 'gsm'; did you mean 'gsm8k'?"),
        (["outputs/latest/export"], "no model is a run"),
        (["nowhere"], "nowhere: no such folder"),
        (
            ["latest", "+evaluation.sets.mc={data: {name: demo}, choices: options}", "--samples", "4"],
            "evaluation.sets.mc, a multiple choice",
        ),
        (
            ["latest", "+evaluation.sets.mc={choices: options}"],
            "evaluation.sets.mc has no data, and the first run has no such set; for a new set, type evaluation.sets.mc",
        ),
        (["outputs/latest/export", "evaluation.sets.long.samples=2"], "evaluation.sets.long has no data"),
    ],
)
def test_mistakes_are_answered_before_a_model_is_loaded(work: Path, words: list[str], message: str) -> None:
    assert message in command.run("eval", *words, cwd=work, code=2)


SORT = {
    "data": {"name": "demo", "task": "sort", "digits": 6, "items": 16},
    "reward": {"name": "numeric", "tolerance": 0.5},
}


def test_typed_options_edit_the_sets_of_the_run() -> None:
    """A preset, a set with data of its own, and one that the run does not have are new ones."""
    own = compose_job(["evaluation.sets.sort={data: {name: demo}}"]).spec
    own = own.model_copy(update={"evaluation": EvaluationConfig(sets={"sort": SORT})})
    drafted = draft(["evaluation.sets.sort.data.digits=5", "evaluation.sets.sort.reward.name=exact"])
    edited = pop_run_set_options(drafted, own)["sort"]
    assert drafted.data["evaluation"]["sets"] == {}
    assert edited == {"data": {**SORT["data"], "digits": 5}, "reward": {"name": "exact"}}
    assert pop_run_set_options(draft(["+evaluation=[sort]", "evaluation.sets.sort.samples=2"]), own) == {}
    assert pop_run_set_options(draft(["evaluation.sets.other.samples=2"]), own) == {}
    assert pop_run_set_options(draft(["evaluation.sets.sort={data: {name: demo, digits: 3}}"]), own) == {}


def test_a_run_whose_model_has_code_of_its_own_needs_the_users_word(tmp_path: Path) -> None:
    spec = compose_job(["+recipe=sft_demo", "model=hf", "model.path=A/B", "model.trust_remote_code=true"]).spec
    write_spec(RunFolder(tmp_path), spec)
    own = _first_run_spec([parse_source(str(tmp_path))], trusts_remote_code=True)
    assert own is not None and own.model.runs_remote_code
    with pytest.raises(SecurityError, match=r"type model\.trust_remote_code=true"):
        _first_run_spec([parse_source(str(tmp_path))], trusts_remote_code=False)


def test_a_runs_set_is_evaluated_with_typed_options(work: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(work / "outputs/latest", run)
    spec = yaml.safe_load((run / "spec.yaml").read_text())
    spec["evaluation"]["sets"] = {"sort": SORT}
    (run / "spec.yaml").write_text(yaml.safe_dump(spec))
    command.run("eval", "run", "evaluation.sets.sort.max_new_tokens=3", "--limit", "4", cwd=tmp_path)
    sets = results(tmp_path)["sets"]
    assert sets["held_out"]["max_new_tokens"] == 6 and sets["sort"]["max_new_tokens"] == 3
    assert sets["sort"]["data"]["digits"] == 6 and sets["sort"]["reward"]["tolerance"] == 0.5
    said = command.run("eval", "run", "evaluation.sets.sort.samples=2", "+evaluation=[sum]", cwd=tmp_path, code=2)
    assert "evaluation.sets.sum is a new set, evaluation.sets.sort one of the run; type a command for each" in said
    said = command.run("eval", "run", "evaluation.sets.sort.temperature=2", cwd=tmp_path, code=2)
    assert "evaluation.sets.sort.temperature: greedy decoding has no temperature" in said


def test_a_run_that_cannot_be_written_to_is_evaluated_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "evaluations.jsonl").mkdir()
    append_evaluation(ModelSource("latest", "run", "run", str(tmp_path)), {"results": "outputs/eval/x"})
    assert "evaluations.jsonl: Is a directory; the results are in outputs/eval/x" in capsys.readouterr().err


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
        file.write(json.dumps({"key": "beyond 64 bits", "ids": [2**70], "finish": "stop"}) + '\n{"key": "torn')
    rest = sampler(path, temperature, 99)
    ids = [one.ids for one in rest.sample(requests)]
    assert ids == [one.ids for one in whole] and rest.journal.num_known >= 4
    lines = path.read_text().splitlines()
    assert len(lines) == 2 + (10 if temperature else 5), "a greedy answer does not depend on the seed"
    known = sampler(path, temperature, 1)  # a new answer would end it
    assert [one.ids for one in known.sample(requests)] == ids


def test_a_request_that_is_refused_cancels_those_before_it(tmp_path: Path) -> None:
    asking = sampler(tmp_path / "a.jsonl", 0.0, 99)
    with pytest.raises(DataError, match="a completion needs at least one token"):
        asking.sample([Request((1, 2, 3), 100, 8, 0), Request((1, 2, 4), 100, 0, 1)])
    assert asking.engine.is_idle
    assert asking.sample([Request((1, 2, 3), 100, 8, 0)])[0].ids


def test_end_tokens_of_a_run_or_of_a_model_are_part_of_a_kept_answers_key(tmp_path: Path) -> None:
    request = Request((1, 2, 3), 100, 8, 0)
    plain = sampler(tmp_path / "a.jsonl", 0.0, 99)
    [whole] = plain.sample([request])
    assert len(whole.ids) == 8
    model = causal("llama")
    model.inner.generation_config.eos_token_id = [whole.ids[2]]
    engine = TorchEngine(model, decide=Decisions(), max_num_seqs=3)
    [ended] = replace(plain, engine=engine, journal=AnswerJournal(tmp_path / "a.jsonl")).sample([request])
    assert ended.ids == whole.ids[: whole.ids.index(whole.ids[2]) + 1]
    again = replace(sampler(tmp_path / "a.jsonl", 0.0, 99), stop_token_ids=(whole.ids[2],))
    [short] = again.sample([request])
    end = whole.ids.index(whole.ids[2]) + 1
    assert short.ids == whole.ids[:end] and short.finish == "stop" and plain.sample([request]) == [whole]


def test_eval_infer_and_serve_of_a_run_stop_where_its_sampler_did(work: Path, tmp_path: Path) -> None:
    first = f"init_from={(work / 'outputs/latest').resolve()}"
    words = ["+recipe=grpo_demo", first, *TINY[1:], "steps=1", "evaluation.every=0", "checkpoint.export=false"]
    command.run(*words, "sampler.stop=['3','6']", "sampler.stop_token_ids=[7]", cwd=tmp_path)
    said = "completions end at the run's sampler.stop=['3', '6'] and sampler.stop_token_ids=[7]"
    assert f"latest: {said}" in command.run("eval", "latest", cwd=tmp_path)
    answers = [one["text"] for path in tmp_path.glob("outputs/eval/answers/*") for one in read_lines(path)]
    assert any(text.endswith(("3", "6")) for text in answers), "the model writes digits, or this would show nothing"
    assert not any(digit in text[:-1] for text in answers for digit in "36")
    assert said in command.run("infer", "latest", "sort 312", cwd=tmp_path)
    with serve(Path("latest"), cwd=tmp_path) as server:
        assert f"{said}, unless a request has stops of its own" in server.printed.read_text()
        body = {"model": server.model, "prompt": "sort 312\n", "temperature": 0, "max_tokens": 8}
        own: list[dict[str, Any]] = [{}, {"stop": None}, {"stop": [], "stop_token_ids": []}, {"ignore_eos": True}]
        answers = [httpx.post(f"{server.url}/completions", json=body | more, timeout=60).json() for more in own]
        texts = [answer["choices"][0]["text"] for answer in answers]
        assert texts[0] == texts[1] and not set("36") & set(texts[0])
        assert texts[2].startswith(texts[0]) and texts[3].startswith(texts[0]) and set("36") & set(texts[2])
    shutil.rmtree(tmp_path / "outputs" / "eval")
    command.run("eval", "latest", "evaluation.max_new_tokens=1", cwd=tmp_path)  # typed options replace the run's
    found = [one["ids"] for path in tmp_path.glob("outputs/eval/answers/*") for one in read_lines(path)]
    assert found and all(len(ids) == 1 for ids in found)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_sets_reward_model_is_found_as_reward_path_is() -> None:
    config = EvaluationConfig(sets={"m": {"reward": {"name": "model", "path": "latest"}}})
    found = config.with_resolved_source(lambda path, *_: f"/export of/{path}")
    assert found.sets["m"]["reward"]["path"] == "/export of/latest"
    absent = EvaluationConfig(sets={"m": {"reward": {"name": "model", "path": "outputs/nowhere/at/all"}}})
    with pytest.raises(SpecError, match=r"evaluation\.sets\.m\.reward\.path: outputs/nowhere/at/all: no such folder"):
        absent.with_resolved_source(resolve_model_path)


def test_a_journal_keeps_answers_as_they_were(tmp_path: Path) -> None:
    journal = AnswerJournal(tmp_path / "a.jsonl")
    journal.add("k", Rollout((1, 2), (0.0, 0.0), None, 0, "length"), {"text": "ä"})
    found = AnswerJournal(tmp_path / "a.jsonl").find("k")
    assert found is not None and ([*found.ids], found.finish) == ([1, 2], "length")


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


def test_answers_in_another_data_type_are_not_those_of_the_same_weights(work: Path) -> None:
    command.run("eval", "latest", cwd=work)
    assert "0 cached" in command.run("eval", "latest", "model.dtype=bfloat16", cwd=work)


def test_differences_are_paired_by_question_and_clustered() -> None:
    samples = [{"reward": r} for r in (1.0, 0.0, None, 0.0, 1.0, None)]  # two answers to each of three questions
    assert question_scores(samples, 3) == [0.5, 0.5, None]
    assert question_scores([{"exact": True}, {"answer": "not comparable"}], 2) == [1.0, None]
    a, b = [0.0, 0.5, 1.0, 0.0], [1.0, 0.5, 1.0, None]
    found = paired_difference(dict(zip("wxyz", a, strict=True)), dict(zip("wxyz", b, strict=True)))
    assert found["difference"] == pytest.approx(1 / 3) and found["questions"] == 3
    half = t_quantile(2) * statistics.stdev([1.0, 0.0, 0.0]) / 3**0.5
    assert found["difference_ci_high"] == pytest.approx(1 / 3 + half)
    assert paired_difference({"w": 1.0}, {"x": 0.0}) == {"questions": 0.0}


def test_models_that_drop_other_rows_are_paired_by_the_row(tmp_path: Path) -> None:
    """One model's template drops the first rows: by position, each question would be paired with another one."""
    rows = [{"prompt": f"{'q7' * (60 if at < 2 else 1)} {at}", "answer": str(at)} for at in range(5)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[4]]))
    keys = []
    for most in (800, 60):
        data = {"name": "file", "path": str(tmp_path / "rows.jsonl"), "max_length": most, "truncation": "skip"}
        spec = compose_job(["model=tiny", "data=demo", "algorithm=sft", "tracker=none"]).spec
        config = default_registry().classes("data")["file"].model_validate(data).as_held_out()
        tokenizer = build_tokenizer(spec, Decisions())
        if most == 60:
            tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }} {% endfor %}"
        found = build_data(spec, tokenizer, Decisions(), config, "prompts").held_out_questions()
        keys.append(unique_keys([question.key for question in found]))
    assert len(keys[0]) == 6 and len(keys[1]) == 4 and keys[1] == keys[0][2:], "the last row is there twice"
    scores = [dict.fromkeys(keys[0][:2], 1.0) | dict.fromkeys(keys[1], 0.0), dict.fromkeys(keys[1], 0.0)]
    assert paired_difference(*scores)["difference"] == 0.0 and paired_difference(*scores)["questions"] == 4
