"""Runs of older versions: schema-N/ has one of each, and the options that its version had with their defaults."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from runner.core.errors import EnvironmentProblem
from runner.run_dir.folder import RunFolder, read_spec
from runner.spec.decode import decode
from runner.spec.job import JobSpec
from runner.spec.registry import default_registry
from runner.spec.saved_spec import KEY, SCHEMA, is_older, translate_spec
from tests import command

STORED = sorted(Path(__file__).parent.glob("schema-*"))
GONE = {("sampler", "vllm_server")}  # components that no longer exist, which a spec is refused for by name


def options() -> list[Any]:
    """(schema, group, component, its options) of each released version."""
    return [
        pytest.param(int(stored.name.partition("-")[2]), group, name, found, id=f"{stored.name}-{group}-{name}")
        for stored in STORED
        for group, components in json.loads((stored / "options.json").read_text()).items()
        for name, found in components.items()
        if (group, name) not in GONE
    ]


@pytest.mark.parametrize(("schema", "group", "name", "found"), options())
def test_each_option_of_an_older_version_has_a_successor(
    schema: int, group: str, name: str, found: dict[str, Any]
) -> None:
    section = {"name": name, **found} if name else found
    saved = translate_spec({KEY: schema, group: section}).data
    cls: Any = default_registry().classes(group)[name] if name else JobSpec.model_fields[group].annotation
    assert saved[group].keys() <= cls.model_fields.keys()


@pytest.mark.parametrize("stored", STORED, ids=lambda path: path.name)
def test_a_spec_of_an_older_version_decodes(stored: Path) -> None:
    saved = read_spec(RunFolder(stored))
    spec = decode(saved.data, {})
    assert saved.note.startswith("an older version wrote this run")
    assert (spec.model.name, spec.steps, spec.evaluation.logged_samples, spec.evaluation.samples) == ("tiny", 4, 8, 0)


@pytest.mark.parametrize(
    ("section", "successor"),
    [
        ({"model": {"name": "tiny", "dtype": "float32", "autocast": "none"}}, ("model", "dtype", "float32")),
        ({"model": {"name": "tiny", "dtype": "float32", "autocast": "bfloat16"}}, ("model", "dtype", "bfloat16")),
        (
            {"data": {"name": "file", "columns": {"question": "prompt"}}},
            ("data", "rename_columns", {"question": "prompt"}),
        ),
        ({"data": {"name": "file", "loss_on": "last_assistant"}}, ("chat", "train_on", "last")),
        ({"algorithm": {"name": "grpo", "overlong": "mask"}}, ("algorithm", "mask_truncated", True)),
        ({"sampler": {"name": "vllm", "cache_gib": 2}}, ("sampler", "kv_cache_memory_bytes", 2 << 30)),
        ({"sampler": {"name": "vllm", "cache_gib": None}}, ("sampler", "kv_cache_memory_bytes", None)),
        ({"launch": {"name": "torchrun", "address": "host:1"}}, ("launch", "rdzv_endpoint", "host:1")),
        ({"launch": {"name": "ray", "address": "auto"}}, ("launch", "address", "auto")),
        ({"evaluation": {"samples": 3}}, ("evaluation", "logged_samples", 3)),
    ],
)
def test_a_value_is_translated_with_its_option(section: dict[str, Any], successor: tuple[str, str, Any]) -> None:
    group, option, value = successor
    assert translate_spec(section).data[group][option] == value


def test_an_unknown_option_stays_for_the_decoder_to_report() -> None:
    assert translate_spec({"model": {"name": "tiny", "made_up": 1}}).data["model"] == {"name": "tiny", "made_up": 1}


def test_a_spec_of_this_version_is_left_alone_and_one_of_a_newer_version_is_refused() -> None:
    own = {"evaluation": {"samples": 3}}
    assert translate_spec({KEY: SCHEMA, **own}).data == own
    with pytest.raises(EnvironmentProblem, match="newer version"):
        translate_spec({KEY: SCHEMA + 1, **own})


def numbers(folder: Path, name: str) -> dict[int, float]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row[name] for row in rows if name in row}


@pytest.mark.slow
@pytest.mark.parametrize("stored", STORED, ids=lambda path: path.name)
def test_a_run_of_an_older_version_continues_and_answers(stored: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(stored, run)
    (run / "status.json").write_text(json.dumps({"state": "stopped", "attempt": 1}))
    printed = command.run("resume", str(run), cwd=tmp_path)
    assert "an older version wrote this run" in printed
    for name in ("train/loss", "train/grad_norm", "train/lr"):
        assert numbers(run, name) == pytest.approx(numbers(stored, name), rel=1e-5), name
    assert not is_older(yaml.safe_load((run / "spec.yaml").read_text()))
    again = tmp_path / "again"
    shutil.copytree(stored, again)
    for words in (
        ("infer", str(again), "sort 5031"),
        ("eval", str(again)),
        ("export", str(again), "--out", "exported"),
        ("report", str(again)),
        ("status", str(again)),
        ("diff", str(again), str(run)),
    ):
        command.run(*words, cwd=tmp_path)
    assert (tmp_path / "exported" / "model.safetensors").is_file()
