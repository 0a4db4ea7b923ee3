"""A run continues from its own checkpoint only: with the spec, the data and, bit for bit, the versions of before."""

from __future__ import annotations

import json
import logging
from importlib.metadata import version
from typing import Any

import pytest
import yaml

from runner.cli.job_builder import compose_job
from runner.core.errors import CheckpointError, DataError, SpecError
from runner.run_dir.manifest import (
    LIBRARIES,
    check_compatible,
    check_model_unchanged,
    check_spec_unchanged,
    immutable_fields,
    run_identity,
)
from runner.spec.decode import decode
from runner.spec.job import JobSpec


def job(*words: str) -> JobSpec:
    return compose_job(["+recipe=sft_demo", *words]).spec


def saved(spec: JobSpec, **changes: Any) -> dict[str, Any]:
    """An identity as a checkpoint gives it back."""
    return (
        json.loads(json.dumps(run_identity(spec, "f00d", "chat", {"config": "c0"}, {"device": "cpu", "threads": 1})))
        | changes
    )


def test_a_spec_that_went_through_its_file_is_the_same() -> None:
    spec = job("optimizer.lr=1e-5", "optimizer.betas=[0.9,0.95]", "algorithm.micro_batch_tokens=77")
    again = decode(yaml.safe_load(yaml.safe_dump(spec.model_dump(mode="json"))), {})
    check_spec_unchanged(again, saved(spec))


def test_every_fixed_option_that_changed_is_named_with_both_values() -> None:
    now = job("optimizer.lr=0.5", "seed=3", "model.layers=2", "device.threads=2")
    with pytest.raises(SpecError) as caught:
        check_spec_unchanged(now, saved(job()))
    assert [p.key for p in caught.value.problems] == ["seed", "device.threads", "model.layers", "optimizer.lr"]
    assert "was 0.002 in the checkpoint, but is 0.5" in str(caught.value)


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ("chat.kwargs=null", "chat.kwargs={thinking:false}", "chat.kwargs.thinking"),
        ("chat.kwargs={a:1}", "chat.kwargs={a:1,thinking:false}", "chat.kwargs.thinking"),
        ("chat.kwargs={a:1}", "chat.kwargs=null", "chat.kwargs.a"),
        ("data.rename_columns={q:prompt}", "data.rename_columns={q:prompt,a:completion}", "data.rename_columns.a"),
    ],
)
def test_a_new_key_of_a_mapping_is_a_change(before: str, after: str, named: str) -> None:
    file = ["data=file", "data.path=rows.jsonl"]
    check_spec_unchanged(job(*file, after), saved(job(*file, after)))
    with pytest.raises(SpecError) as caught:
        check_spec_unchanged(job(*file, after), saved(job(*file, before)))
    assert [p.key for p in caught.value.problems] == [named]


def test_an_option_that_the_checkpoint_does_not_know_is_no_change() -> None:
    older = saved(job())
    del older["spec"]["chat"]["kwargs"]
    check_spec_unchanged(job(), older)


@pytest.mark.parametrize("word", ["steps=999", "evaluation.every=1", "tracker=none", "checkpoint.keep=9"])
def test_what_a_resume_may_change_is_free(word: str) -> None:
    check_spec_unchanged(job(word), saved(job()))
    assert word.partition("=")[0].partition(".")[0] not in immutable_fields(job())


def test_compiled_layers_are_no_part_of_what_a_run_is() -> None:
    check_spec_unchanged(job("model.compile=true"), saved(job()))
    check_spec_unchanged(job("device=cuda", "model.compile=false"), saved(job("device=cuda")))


def test_a_use_may_change_the_device_and_nothing_else() -> None:
    check_spec_unchanged(job("device=cuda", "model.dtype=float32"), saved(job()), free=("device",))
    with pytest.raises(SpecError, match=r"adapter\.name"):
        check_spec_unchanged(job("adapter=lora"), saved(job()), free=("device",))


def test_other_data_is_refused() -> None:
    with pytest.raises(DataError, match="the data"):
        check_compatible(saved(job()), saved(job(), data="beef"))


@pytest.mark.parametrize("origin", [{"config": "c0", "weights": "b"}, {"config": "c1"}, {"commit": "c0"}, {}])
def test_another_model_is_refused_by_whoever_uses_the_checkpoint(origin: dict[str, str]) -> None:
    with pytest.raises(CheckpointError, match="restore the model"):
        check_model_unchanged(origin, saved(job()))
    with pytest.raises(CheckpointError, match="restore the model"):
        check_compatible(saved(job(), model=origin), saved(job()))
    check_model_unchanged({"config": "c0"}, saved(job()))


@pytest.mark.parametrize("what", ["runner", *LIBRARIES, "threads"])
def test_other_versions_are_said(what: str, caplog: pytest.LogCaptureFixture) -> None:
    now = saved(job())
    with caplog.at_level(logging.WARNING, "runner"):
        check_compatible(now, now)
        assert caplog.messages == []
        check_compatible(now, now | {what: "0.1"})
    assert [f"{what} was 0.1, now {now[what]}" in message for message in caplog.messages] == [True]


def test_the_versions_are_those_installed() -> None:
    assert {name: saved(job())[name] for name in LIBRARIES} == {name: version(name) for name in LIBRARIES}
