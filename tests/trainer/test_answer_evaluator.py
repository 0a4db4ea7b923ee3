"""Held-out rewards: what is measured of answers, named sets, what is refused, and that training does not change."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from runner.algorithm.rollouts import RolloutSample
from runner.cli.job_builder import compose_job
from runner.cli.main import main
from runner.core.errors import SpecError
from runner.interfaces import EvalQuestion, TokenizedExample
from runner.trainer.answer_evaluator import _is_exact
from tests.small import TINY

SHORT = (*TINY[2:], "algorithm.batch_size=4", "steps=2", "checkpoint.every=0", "evaluation.max_new_tokens=4")
SAMPLED = (
    "sampler=torch",
    "sampler.max_new_tokens=4",
    "algorithm.group_size=4",
    "reward=format",
    r"reward.pattern='.*\w.*'",
)
ALGORITHMS = {
    "sft": ("algorithm=sft", "adapter=lora", "adapter.dropout=0.2"),
    "dpo": ("algorithm=dpo",),
    "grpo": ("algorithm=grpo", *SAMPLED),
    "ahead": ("algorithm=grpo", "algorithm.lag=1", *SAMPLED),
    "ppo": ("algorithm=ppo", *(word for word in SAMPLED if "group_size" not in word)),
}
MEASURED = (
    "evaluation.every=1",
    "evaluation.samples=2",
    "evaluation.sets.hard={data: {name: demo, digits: 6, held_out: 5}, reward: {name: numeric}, max_new_tokens: 8}",
)
OF_TIME = ("time/", "perf/", "eval/", "device/", "weight_sync/")


def run(*words: str) -> tuple[list[dict[str, Any]], bytes]:
    """The metrics of a run, and its exported weights."""
    assert main(["device.threads=1", "seed=5", *SHORT, *words]) == 0
    lines = Path("outputs/latest/metrics.jsonl").read_text().splitlines()
    [weights] = Path("outputs/latest/export").glob("*.safetensors")
    return [json.loads(line) for line in lines], weights.read_bytes()


def without_times(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    trained = [one for one in steps if one["step"] > 0]
    return [{name: value for name, value in one.items() if not name.startswith(OF_TIME)} for one in trained]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_training_is_bit_for_bit_the_same_with_evaluation_and_without(algorithm: str, workdir: Path) -> None:
    on, weights = run(*ALGORITHMS[algorithm], *MEASURED)
    off, same = run(*ALGORITHMS[algorithm], "evaluation.every=0")
    assert without_times(on) == without_times(off) and weights == same
    last = on[-1]
    assert last["train/grad_norm"] > 0
    assert {"eval/mean@2", "eval/pass@2", "eval/pass@2_ci_low", "eval/exact_match", "eval/length"} <= last.keys()
    assert {"eval/hard/reward/mean", "eval/hard/mean@1", "eval/hard/exact_match"} <= last.keys()
    assert ("eval/reward/mean" in last) == (algorithm in ("grpo", "ahead", "ppo"))


def test_held_out_rewards_are_measured_without_being_asked_for(workdir: Path) -> None:
    steps, _ = run("algorithm=grpo", *SAMPLED[:3], "reward=exact", "evaluation.every=2")
    last = steps[-1]
    assert last["eval/reward/mean"] == last["eval/exact_match"] == last["eval/mean@1"], "greedy answers, scored by both"
    assert last["eval/reward/num_failed"] == 0 and 0 <= last["eval/truncated_frac"] <= 1
    rows = [json.loads(line) for line in Path("outputs/latest/samples.jsonl").read_text().splitlines()]
    evaluated = [row for row in rows if "expected" in row]
    first, second = ([row["prompt"] for row in evaluated if row["step"] == step] for step in (0, 2))
    assert first == second and len(first) == 8, "the same questions at each evaluation"
    assert all({"reward", "exact", "finish"} <= row.keys() for row in evaluated)


@pytest.mark.parametrize(("algorithm", "loss"), [("dpo", math.log(2)), ("kto", 0.5)])
def test_the_loss_of_held_out_preferences_is_that_of_the_algorithm(algorithm: str, loss: float, workdir: Path) -> None:
    steps, _ = run(f"algorithm={algorithm}", "evaluation.every=2")
    assert steps[0]["eval/loss"] == pytest.approx(loss), "before the first step, policy and reference are equal"
    assert "eval/loss_ci_low" not in steps[0] and "eval/exact_match" in steps[0]


REFUSED = {
    "checkpoint.best: pass@8 is not measured with evaluation.samples=4, only mean@4, pass@2, pass@4": (
        "evaluation.samples=4",
        "checkpoint.best=eval/pass@8",
    ),
    "checkpoint.best: eval/hrad/loss: no evaluation set is named hrad": ("checkpoint.best=eval/hrad/loss",),
    "checkpoint.best: eval/reward/mean needs a reward": ("checkpoint.best=eval/reward/mean",),
    "evaluation.sets.a.sampels: not an option of a set; did you mean 'samples'": ("evaluation.sets.a={sampels: 2}",),
    "evaluation.sets.a.reward.name: no reward named 'exakt'; did you mean 'exact'": (
        "evaluation.sets.a={reward: {name: exakt}}",
    ),
    "evaluation.sets.a.reward.toleranse: not an option of reward=numeric; did you mean 'tolerance'": (
        "evaluation.sets.a={reward: {name: numeric, toleranse: 1}}",
    ),
    "evaluation.sets.a.samples: expected an integer at least 0, got -1": ("evaluation.sets.a={samples: -1}",),
    "evaluation.sets.a.data.items: 4000 and data.held_out=900 are more": (
        "evaluation.sets.a={data: {name: demo, digits: 2, held_out: 900}}",
    ),
    "evaluation.sets.reward: cannot be a set's name": ("evaluation.sets.reward={samples: 1}",),
    "evaluation.temperature: greedy decoding has no temperature": ("evaluation.temperature=0.5",),
    "evaluation.sets: not evaluated, because evaluation.every=0": ("evaluation.every=0", "evaluation.sets.a={}"),
}


@pytest.mark.parametrize("text", REFUSED)
def test_it_is_refused_before_anything_is_built(text: str, workdir: Path) -> None:
    with pytest.raises(SpecError) as error:
        compose_job(["algorithm=sft", *REFUSED[text]])
    assert text in str(error.value)


@pytest.mark.parametrize("metric", ["eval/pass@4", "eval/mean@4", "eval/hard/reward/mean", "eval/hard/exact_match"])
def test_a_metric_that_the_job_has_chooses_the_best_checkpoint(metric: str, workdir: Path) -> None:
    words = ("evaluation.samples=4", "evaluation.sets.hard={reward: {name: exact}}")
    assert compose_job(["algorithm=sft", *words, f"checkpoint.best={metric}"]).spec.checkpoint.best == metric


def test_options_of_completions_are_refused_where_held_out_rows_have_none(workdir: Path) -> None:
    pairs = ["data=file", "data.path=pairs.jsonl", "model=tiny"]
    typed = ["samples=2", "temperature=0.5", "pass_threshold=0.5", "batch_size=8"]
    words = [f"evaluation.{word}" for word in typed]
    for algorithm, more, used in (
        ("dpo", pairs, []),
        ("kto", [*pairs, "evaluation.sets.a={data: {name: demo}}"], ["batch_size=8"]),
        ("rm", ["data=demo", "model=tiny"], []),
        ("dpo", ["data=demo", "model=tiny"], typed),  # the demo's pairs have expected answers
        ("dpo", [*pairs, "evaluation.every=0"], typed),
    ):
        job = [f"algorithm={algorithm}", "evaluation.max_new_tokens=4", *more]
        if used:
            compose_job([*job, *(f"evaluation.{word}" for word in used)])
        if refused := [word for word in words if word.removeprefix("evaluation.") not in used]:
            with pytest.raises(SpecError) as error:
                compose_job([*job, *words])
            keys = [f"{word.partition('=')[0]}: changes nothing" for word in refused]
            assert [line for line in keys if line not in str(error.value)] == []
            assert str(error.value).count("changes nothing") == len(keys)


def test_rows_of_a_file_are_a_set(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1), "level": n % 2} for n in range(6)]
    Path("test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = "{data: {name: file, path: test.jsonl, cache: false}, reward: {name: numeric}, samples: 2, limit: 4}"
    steps, _ = run("algorithm=sft", "evaluation.every=2", f"evaluation.sets.plus={given}")
    assert {"eval/plus/reward/mean", "eval/plus/pass@2", "eval/plus/reward/mean_ci_high"} <= steps[-1].keys()
    assert {"eval/plus/loss", "eval/plus/loss_ci_low", "eval/length", "eval/truncated_frac_ci_high"} <= steps[-1].keys()
    assert "eval/mean@1" not in steps[-1], "without a reward it is eval/exact_match"
    missing = given.replace("numeric}", "numeric, column: anwser}")
    assert main([*SHORT, "algorithm=sft", f"evaluation.sets.plus={missing}"]) == 2
    assert main([*SHORT, "algorithm=sft", f"evaluation.sets.plus={given.replace('test.jsonl', 'gone.jsonl')}"]) == 3
    assert "error: evaluation.sets.plus: data.path=gone.jsonl: no such file or folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("said", "expected", "exact"),
    [
        (" 4\n", "4", True),
        ("2+2 is 4</think>\n\n4", "4", True),
        ("4</think>\n\n5", "4", False),
        ("carry</think>4", "carry</think>4", True),
        ("other</think>4", "carry</think>4", False),
        ("4", "carry</think>4", False),
        # a template that writes empty reasoning, and one whose prompt opens reasoning
        ("<think>\n2 and 2 make 4\n</think>\n\n4", "<think>\n\n</think>\n\n4", True),
        ("<think>\n4\n</think>\n\n5", "<think>\n\n</think>\n\n4", False),
        ("4", "<think>\n\n</think>\n\n4", True),
        ("<think>\n4", "<think>\n\n</think>\n\n4", False),
        ("2 and 2 make 4\n</think>\n\n4", "\n</think>\n\n4", True),
        ("4", "\n</think>\n\n4", False),
        ("<think>\nso\n</think>\n\n4", "<think>\nso\n</think>\n\n4", True),
        ("4", "<think>\nso\n</think>\n\n4", False),
    ],
)
def test_reasoning_that_the_expected_completion_lacks_is_not_compared(said: str, expected: str, exact: bool) -> None:
    question = EvalQuestion(TokenizedExample((1,), (0.0,)), answer=expected)
    assert _is_exact(question, cast(RolloutSample, SimpleNamespace(text=said))) is exact
