"""`data.max_length=null` is the length of the longest item, up to what the model allows."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from runner.build.components import build_tokenizer, longest_row
from runner.build.data import build_data, resolve_max_length
from runner.build.samplers import _report_episode_limit, engine_row_limit
from runner.cli.job_builder import compose_job
from runner.core.auto_choices import Decisions
from runner.core.errors import DataError, SpecError
from runner.spec.job import JobSpec


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "p" * n, "completion": "c"}) + "\n" for n in (3, 50, 20)))
    return str(path)


def resolve(*words: str) -> tuple[JobSpec, Decisions]:
    spec, decide = compose_job(list(words)).spec, Decisions(strict=True)
    return resolve_max_length(spec, build_data(spec, build_tokenizer(spec, Decisions()), decide), decide), decide


def test_it_is_the_longest_item_and_said(rows: str) -> None:
    spec, decide = resolve("data=file", f"data.path={rows}", "data.truncation=error")
    assert longest_row(spec) == spec.data.max_length == 52  # prompt, completion and end token
    assert "data.max_length: 52 (no item of the data is longer, and the model allows it)" in map(str, decide.entries)
    _, decide = resolve("data=file", f"data.path={rows}", "data.streaming=true", "steps=1")
    assert any("2048 (the most that the model allows, as the rows of a stream" in str(e) for e in decide.entries)
    given, _ = resolve("data=file", f"data.path={rows}", "data.max_length=60")
    assert given.data.max_length == 60


def test_a_row_above_the_positions_of_the_model_is_named(rows: str) -> None:
    with pytest.raises(DataError) as caught:
        resolve("data=file", f"data.path={rows}", "model.max_positions=40")
    text = str(caught.value)
    assert "rows.jsonl:2: 52 tokens, above 40 (data.max_length: the model has 40 positions)" in text
    assert "1 row is too long; type data.truncation=skip" in text
    spec, _ = resolve("data=file", f"data.path={rows}", "model.max_positions=40", "data.truncation=skip")
    assert spec.data.max_length == 22
    with pytest.raises(DataError, match=r"type data\.max_length=52 to keep all, or data\.truncation"):
        resolve("data=file", f"data.path={rows}", "data.max_length=30")


def test_a_prompt_leaves_room_for_its_answer(rows: str) -> None:
    job = ["+recipe=grpo_demo", "data=file", f"data.path={rows}", "data.truncation=skip", "model.max_positions=64"]
    spec, _ = resolve(*job, "sampler.max_new_tokens=20")
    assert (spec.data.max_length, longest_row(spec)) == (20, 40)
    with pytest.raises(SpecError, match=r"sampler\.max_new_tokens: 63 new tokens leave no room for a prompt"):
        resolve(*job, "sampler.max_new_tokens=63")


def test_an_engine_has_room_for_whole_episodes(rows: str) -> None:
    job = ["+recipe=grpo_demo", "data=file", f"data.path={rows}", "sampler.max_new_tokens=20"]
    assert engine_row_limit(compose_job(job).spec) == 2**31  # of which the sampler's build() takes what the model has
    assert engine_row_limit(compose_job(job := [*job, "data.max_length=32"]).spec) == 52
    assert engine_row_limit(compose_job([*job, "environment=calculator"]).spec) == 2**31


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("environment=calculator",), "a prompt and 4 turns can have 112 tokens, without the environment's messages"),
        (("max_episode_tokens=70",), "a prompt and 8 turns can have 102 tokens"),
        (("max_episode_tokens=60",), None),
    ],
)
def test_episodes_that_outgrow_the_sampler_are_said(words: tuple[str, ...], said: str | None) -> None:
    job = ["+recipe=grpo_demo", "data.max_length=32", "sampler.max_new_tokens=20"]
    if words[0] != "environment=calculator":
        job += ["environment=function", "environment.path=shop.py:Shop"]
        words = (f"environment.{words[0]}",)
    _report_episode_limit(compose_job([*job, *words]).spec, SimpleNamespace(max_model_len=100), decide := Decisions())  # type: ignore[arg-type]
    assert [fact["reason"] for fact in decide.records()["facts"]] == ([said] if said else [])


@pytest.mark.parametrize("recipe", ["sft_demo", "grpo_demo"])
def test_no_item_of_the_demo_is_longer(recipe: str) -> None:
    spec = compose_job([f"+recipe={recipe}"]).spec
    data = build_data(spec, build_tokenizer(spec, Decisions()), Decisions())
    items = [getattr(item, "ids", None) or item.prompt for item in data.take(0, 50)]
    assert max(map(len, items)) <= data.longest < 200
