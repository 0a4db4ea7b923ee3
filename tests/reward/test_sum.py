"""A weighted sum: its parts decoded with every problem under its own key, and what it computes."""

from __future__ import annotations

import re
from array import array
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from runner.algorithm.experience_state import decode_experience, encode_experience
from runner.algorithm.rollouts import (
    CompositeReward,
    Experience,
    Group,
    RolloutSample,
    reward_metrics,
)
from runner.core.auto_choices import Decisions
from runner.core.errors import DataError, EnvironmentProblem, SpecError
from runner.interfaces import Prompt
from runner.reward.base import RESERVED_NAMES, component_names, require_components
from runner.reward.config import COMPONENTS, ExactConfig, FunctionConfig, RewardConfig, SumConfig
from tests.reward.samples import answer, made, scores


def problems(*parts: dict[str, Any]) -> dict[str, str]:
    return dict(SumConfig(parts=list(parts)).problems(None))


def test_weights_multiply_and_scores_add() -> None:
    config = SumConfig(
        parts=[
            {"name": "exact", "weight": 2, "column": "answer"},
            {"name": "length", "target": 4, "weight": 0.5},
            {"name": "format", "pattern": "[0-9]"},
        ]
    )
    assert scores(config, answer("4", 4, answer="4"), answer("x", 2, answer="4")) == [2 * 1 + 0 + 1, 0 - 0.25 + 0]


def test_each_part_says_what_it_gave_before_its_weight() -> None:
    config = SumConfig(parts=[{"name": "exact", "weight": 2}, {"name": "numeric"}, {"name": "exact", "weight": -1}])
    reward = made(config)
    assert isinstance(reward, CompositeReward)
    totals, parts = reward.score_components(
        [[answer("4", answer="4"), answer("5", answer="4")], [answer("x", answer="x")]]
    )
    assert totals == reward.score([[answer("4", answer="4"), answer("5", answer="4")], [answer("x", answer="x")]])
    assert totals == [[2.0, 0.0], [None]]
    assert parts == [
        [{"exact[0]": 1.0, "numeric": 1.0, "exact[2]": 1.0}, {"exact[0]": 0.0, "numeric": 0.0, "exact[2]": 0.0}],
        [{"exact[0]": 1.0, "numeric": None, "exact[2]": 1.0}],
    ]
    reward.close()


def test_no_part_takes_the_name_of_another_number() -> None:
    assert component_names(["exact", "length", "mean", "length"]) == ["exact", "length[1]", "mean[2]", "length[3]"]
    scored = RolloutSample((1,), (1.0,), (0.0,), "", "stop", 0, 1.0)
    own = reward_metrics(Experience(0, (Group(Prompt((1,), ""), (scored, scored)),), 1))
    assert {name.removeprefix("reward/") for name in own} == set(RESERVED_NAMES)


def test_the_means_of_the_parts_are_metrics_and_survive_a_checkpoint() -> None:
    """Over the samples that the part could score, those included that the sum could not."""
    samples = [
        RolloutSample(
            array("q", [1]),
            array("d", [1.0]),
            array("d", [0.0]),
            "",
            "stop",
            0,
            None if b is None else a + b,
            (),
            {"exact": a, "numeric": b},
        )
        for a, b in [(1.0, 0.5), (0.0, None), (1.0, 0.1)]
    ]
    experience = Experience(0, (Group(Prompt((1,), ""), tuple(samples[:2])), Group(Prompt((2,), ""), (samples[2],))), 1)
    found = reward_metrics(experience)
    assert found["reward/exact"] == pytest.approx(2 / 3) and found["reward/numeric"] == pytest.approx(0.3)
    assert found["reward/mean"] == pytest.approx(1.3) and found["reward/num_failed"] == 1
    assert (
        decode_experience(encode_experience(experience)) == experience
        and reward_metrics(decode_experience(encode_experience(experience))) == found
    )


def test_what_one_part_cannot_score_is_not_scored(caplog: pytest.LogCaptureFixture) -> None:
    config = SumConfig(parts=[{"name": "exact"}, {"name": "numeric"}])
    assert scores(config, answer("4", answer="4"), answer("four", answer="four"), answer("4")) == [2, None, None]
    assert "reward=numeric: 2 of 3 samples" in caplog.text and "reward=exact: 1 of 3" in caplog.text


@given(st.lists(st.floats(-9, 9).filter(bool), min_size=1, max_size=4))
def test_a_sum_of_one_reward_is_that_reward_times_the_weights(weights: list[float]) -> None:
    config = SumConfig(parts=[{"name": "exact", "weight": w} for w in weights])
    assert scores(config, answer("4", answer="4"), answer("5", answer="4")) == pytest.approx([sum(weights), 0.0])


def test_every_problem_has_the_key_of_its_part() -> None:
    found = problems(
        {"name": "exact", "colum": "a", "ignore_case": "yes"},
        {"name": "exakt"},
        {"name": "numeric", "tolerance": -1, "weight": "big"},
        {"weight": 1},
        {"name": "function"},
        {"name": "length", "max_length": 3},
        {"name": "format", "pattern": "(", "weight": 0},
        {"name": "sum", "parts": []},
        {"name": "none"},
        {"name": "http", "url": "???"},
        {"name": "format", "pattern": "("},
        {"name": "exact", "url": "http://x"},
        {"name": "exact", "weight": 1.5, "column": "a"},
    )
    expected = {
        "reward.parts[0].colum": "not an option of reward=exact; did you mean 'column'?",
        "reward.parts[0].ignore_case": "expected true or false, got 'yes'",
        "reward.parts[1].name": "no reward named 'exakt'; did you mean 'exact'? (",
        "reward.parts[2].tolerance": "expected a number at least 0, got -1",
        "reward.parts[2].weight": "expected a number, got 'big'",
        "reward.parts[3].name": "each part needs the name of a reward: {name: …} (",
        "reward.parts[4].path": "must be given  (File and function",
        "reward.parts[5].overlong_buffer_len": "must be set, because the other of the two is",
        "reward.parts[6].weight": "a weight of 0 disables the part; remove the part",
        "reward.parts[7].name": "sum cannot be a part of a sum (",
        "reward.parts[8].name": "none cannot be a part of a sum (",
        "reward.parts[9].url": "must be given  (URL of",
        "reward.parts[10].pattern": "not a regular expression",
        "reward.parts[11].url": "not an option of reward=exact; an option of reward=code",
    }
    assert {key: found[key][: len(start)] for key, start in expected.items()} == expected
    assert found.keys() == expected.keys()


def test_an_empty_sum_and_parts_that_are_no_sections_are_refused() -> None:
    for parts in ([], ["exact"], {"exact": 1}, [{"name": "exact"}, 3]):
        with pytest.raises(ValueError):
            SumConfig(parts=parts)


def test_every_reward_but_none_and_sum_can_be_a_part_and_a_plug_ins_too() -> None:
    class Theirs(RewardConfig):
        """A plug-in's reward."""

        factory = "runner.reward.rules:build"
        name: str = "theirs"

    known = problems({"name": "?"})["reward.parts[0].name"].rpartition("(")[2]
    ours = {cls.component_name() for cls in COMPONENTS} - {"none", "sum"}
    assert ours | {"theirs"} <= set(known.removesuffix(")").split(", "))
    assert isinstance(require_components([{"name": "theirs"}])[0].config, Theirs)


def test_the_resolved_spec_has_every_default_and_decodes_to_the_same() -> None:
    config = SumConfig(parts=[{"name": "exact", "column": "a"}, {"name": "length", "target": 3, "weight": -1}])
    record = config.model_dump(mode="json")
    assert record["parts"][0] == {
        "name": "exact",
        "weight": 1.0,
        **ExactConfig(column="a").model_dump(exclude={"name"}),
    }
    again = SumConfig.model_validate(record)
    assert (
        require_components(again.parts) == require_components(config.parts) and again.model_dump(mode="json") == record
    )


def test_a_parts_files_are_made_absolute_and_checked(workdir: Path) -> None:
    config = SumConfig(parts=[{"name": "exact"}, {"name": "function", "path": "mine.py:score", "weight": 3.0}])
    with pytest.raises(SpecError) as caught:
        config.preflight()
    assert [p.key for p in caught.value.problems] == ["reward.parts[1].path"]
    (workdir / "mine.py").write_text("def score(completions): return [0.5 for _ in completions]")
    config.preflight()
    part = require_components(config.with_absolute_paths().parts)[1]
    assert isinstance(part.config, FunctionConfig) and part.weight == 3.0
    assert part.config.path == f"{workdir.resolve()}/mine.py:score"
    assert scores(config, answer("4", answer="4")) == [1 + 3 * 0.5]


def test_the_examples_of_the_documentation_decode() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "rewards.md").read_text()
    [recipe] = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert [p.weight for p in require_components(yaml.safe_load(recipe)["reward"]["parts"])] == [1.0, 0.2, 1.0]
    [typed] = re.findall(r"'(reward\.parts=.*?)'", page)
    value = OverridesParser.create().parse_override(typed).value()
    assert [(p.config.name, p.weight) for p in require_components(value)] == [("exact", 1.0), ("length", 0.5)]
    [extract] = re.findall(r"'(reward\.extract=.*?)'", page)
    assert OverridesParser.create().parse_override(extract).value() == "<answer>(.*?)</answer>"


def test_what_was_built_is_closed_when_a_later_part_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(completions): ...")
    (tmp_path / "broken.py").write_text("import no_such_package\ndef score(): ...")
    paths = [{"name": "function", "path": f"{tmp_path}/{name}.py:score"} for name in ("mine", "broken")]
    with pytest.raises(SpecError, match=r"reward\.parts\[1\]\.path: .*no_such_package"):
        made(SumConfig(parts=paths))  # a process left over is a ResourceWarning, and that an error
    with pytest.raises(EnvironmentProblem, match="strict"):
        made(SumConfig(parts=paths[:1]), decide=Refusing(strict=True))


class Refusing(Decisions):
    def __call__(self, feature: str, wanted: str, got: str, reason: str) -> None:
        super().__call__(feature, wanted, got + "!", reason)


def test_the_errors_of_all_parts_come_together(tmp_path: Path) -> None:
    missing = [{"name": "function", "path": f"{tmp_path}/{name}.py:score"} for name in ("a", "b")]
    (tmp_path / "writes").mkdir()
    (tmp_path / "writes/config.json").write_text('{"architectures": ["Qwen2ForCausalLM"]}')
    folder = {"name": "model", "path": str(tmp_path / "writes")}
    with pytest.raises(SpecError) as spec:
        SumConfig(parts=missing).preflight()
    assert [problem.key for problem in spec.value.problems] == ["reward.parts[0].path", "reward.parts[1].path"]
    with pytest.raises(EnvironmentProblem) as both:
        SumConfig(parts=[folder, *missing]).preflight()
    assert all(name in str(both.value) for name in ("/writes", "/a.py", "/b.py"))


def test_all_parts_that_score_nothing_are_named() -> None:
    parts = [{"name": "exact", "column": name, "max_failures": 1} for name in ("first", "second")]
    reward = made(SumConfig(parts=parts))
    with pytest.raises(DataError) as failed:
        reward.score([[answer("4")]])
    reward.close()
    assert "column 'first'" in str(failed.value) and "column 'second'" in str(failed.value)


def test_parts_that_fail_on_different_samples_of_each_group_end_the_run() -> None:
    parts = [{"name": "exact", "column": name, "max_failures": limit} for name, limit in (("first", 2), ("second", 3))]
    reward = made(SumConfig(parts=parts))
    group = [answer("4", first="4"), answer("4", second="4")]
    assert reward.score([group, group]) == [[None, None], [None, None]]
    with pytest.raises(DataError, match=r"no sample of 3 groups in a row .*\n.*exact.1. for 1, exact.0. for 1"):
        reward.score([group])
    reward.close()
