"""The presets of evaluation sets: each composes, reads rows of its data's shape, and scores answers to them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runner.build.components import build_tokenizer
from runner.build.data import build_data
from runner.build.rewards import refuse_missing_columns
from runner.cli.job_builder import compose_job
from runner.core.auto_choices import Decisions
from runner.core.errors import SpecError
from runner.core.package import conf_dir
from runner.data.config import FileConfig, HubConfig
from runner.interfaces import Completion, Prompt
from runner.spec.evaluation import EvaluationSet
from runner.spec.registry import default_registry

PRESETS = sorted(path.stem for path in (conf_dir() / "evaluation").glob("*.yaml"))
MADE_HERE = ("arithmetic", "format", "reverse", "sort", "sum")
# preset: a row of the data's shape, right answers, wrong answers
ROWS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "gsm8k": (
        {"question": "Ann has 3 bags of 4 apples. How many?", "answer": "3*4=<<3*4=12>>12\n#### 12"},
        ["3 times 4 is 12", "#### 12.0"],
        ["3 times 4 is 13", "none"],
    ),
    "math500": (
        {"problem": "Half of a third?", "solution": "…", "answer": "\\frac{1}{6}", "subject": "Algebra", "level": 1},
        ["It is $\\boxed{\\frac{1}{6}}$", "\\boxed{1/6}"],
        ["\\boxed{\\frac{1}{5}}", "none"],
    ),
    "aime": (
        {"id": 60, "problem": "How many?", "solution": "…", "answer": "204", "url": "…", "year": "2024"},
        ["\\boxed{204}", "So it is 204."],
        ["203"],
    ),
    "ifeval": (
        {"key": 1, "prompt": "Praise tea without commas, in capitals.", "kwargs": [{}, {"num_words": 3, "relation":
         "at least"}], "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"]},
        ["TEA IS GOOD"],
        ["TEA, IS GOOD", "TEA"],
    ),
    "mmlu_pro": (
        {"question_id": 1, "question": "Which is red?", "options": ["sky", "rose", "grass"], "answer": "B",
         "answer_index": 1, "cot_content": "", "category": "other", "src": "x"},
        ["Roses are red. The answer is B", "The answer is (B)."],
        ["The answer is C", "A or B? The answer is A", "rose"],
    ),
}  # fmt: skip


def decoded(*words: str) -> tuple[Any, list[EvaluationSet]]:
    spec = compose_job(["+recipe=sft_demo", *words]).spec
    return spec, spec.evaluation.decoded_sets()


def test_several_are_chosen_at_once_and_their_options_are_set_beside(workdir: Path) -> None:
    spec, sets = decoded("+evaluation=[gsm8k,sort]", "evaluation.sets.sort.samples=2", "evaluation.every=7")
    assert [one.name for one in sets] == ["gsm8k", "sort"] and spec.evaluation.every == 7
    assert sets[1].options.samples == 2 and isinstance(sets[0].components["data"], HubConfig)
    assert [one.name for one in decoded("evaluation=format")[1]] == ["format"]
    with pytest.raises(SpecError, match="no evaluation named 'gsm8'; did you mean 'gsm8k'"):
        decoded("+evaluation=gsm8")


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_composes_and_is_named_as_its_set(preset: str, workdir: Path) -> None:
    spec, [one] = decoded(f"+evaluation={preset}")
    assert one.name == preset and spec.evaluation.problems(spec) == []


@pytest.mark.parametrize("preset", [p for p in PRESETS if p in ROWS])
def test_rows_of_the_datas_shape_are_read_and_scored(preset: str, workdir: Path) -> None:
    row, right, wrong = ROWS[preset]
    if preset == "math500":
        pytest.importorskip("math_verify")
    Path("rows.jsonl").write_text(json.dumps(row) + "\n")
    spec, [one] = decoded(f"+evaluation={preset}")
    hub = one.components["data"]
    assert isinstance(hub, HubConfig)
    shared = {name: getattr(hub, name) for name in ("rename_columns", "max_eval_examples", "max_length")}
    data_config = FileConfig(path="rows.jsonl", cache=False, **shared).as_held_out()
    spec = spec.model_copy(update=one.components | {"data": data_config})
    data = build_data(spec, build_tokenizer(spec, Decisions()), Decisions(), data_config, "prompts")
    refuse_missing_columns(spec, data)
    [question] = data.held_out_questions()
    prompt = Prompt(question.prompt_ids, question.prompt, question.messages, question.columns)
    scores = score(spec, prompt, right + wrong)
    assert scores == [1.0] * len(right) + [0.0] * len(wrong)


@pytest.mark.parametrize("preset", MADE_HERE)
def test_the_expected_answers_of_sets_made_here_score_and_others_do_not(preset: str, workdir: Path) -> None:
    spec, [one] = decoded(f"+evaluation={preset}")
    spec = spec.model_copy(update=dict(one.components))
    data = build_data(
        spec, build_tokenizer(spec, Decisions()), Decisions(), one.components["data"].as_held_out(), "prompts"
    )
    questions = data.held_out_questions()
    assert len({question.prompt for question in questions}) == len(questions) == 256
    for question in questions[:8]:
        prompt = Prompt(question.prompt_ids, question.prompt, question.messages, question.columns)
        assert score(spec, prompt, [question.answer, "no idea"]) == [1.0, 0.0]


def score(spec: Any, prompt: Prompt, answers: list[str]) -> list[float | None]:
    reward = default_registry().factory(spec.reward)(spec.reward, decide=Decisions(), folder=Path("."), seed=0)
    try:
        [scores] = reward.score([[Completion(prompt, (1,), answer, "stop") for answer in answers]])
    finally:
        reward.close()
    return list(scores)
