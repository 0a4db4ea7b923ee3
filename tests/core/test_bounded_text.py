"""Texts from outside that would use up the memory or the stack end at once, with a typed error."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.checkpoint.format import MANIFEST_FILE, DamagedCheckpoint, read_manifest
from runner.cli.main import main
from runner.core.errors import CheckpointError, EnvironmentProblem
from runner.core.untrusted_text import check_yaml, parse_json, shorten
from runner.data.conversation import CALL_FORMS, plain_messages
from runner.model.model_folder import read_header, read_json
from runner.run_dir.folder import read_mapping

BOMB = "\n".join(
    ["a0: &a0 [" + ", ".join("x" * 10) + "]"]
    + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
)
BRACKETS = "[" * 100_000


@pytest.mark.parametrize(
    ("text", "said"), [(BOMB, "more than 100000 values"), (BRACKETS, "nested more than 100 levels")]
)
def test_yaml_is_bounded(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        check_yaml(text)
    (tmp_path / "spec.yaml").write_text(text)
    with pytest.raises(EnvironmentProblem, match=said):
        read_mapping(tmp_path / "spec.yaml")


def test_ordinary_yaml_passes() -> None:
    check_yaml("a: &a {b: 1}\nc: [*a, *a]\n" + "- x\n" * 1000)
    check_yaml("list:\n" + "".join(f"- {{name: x{i}, on: [1, 2]}}\n" for i in range(1000)))
    check_yaml("* no yaml: [")


@pytest.mark.parametrize("text", [BOMB, BRACKETS])
def test_a_recipe_that_is_a_bomb_ends_at_once(text: str, workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("bomb.yaml").write_text(text)
    begin = time.monotonic()
    assert main(["+recipe=bomb.yaml"]) == 2
    said = capsys.readouterr().err
    assert time.monotonic() - begin < 200 and "bomb.yaml" in said and len(said) < 1000, said
    assert main(["--spec", "bomb.yaml"]) == 2


def test_json_is_bounded(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json(BRACKETS)
    with pytest.raises(ValueError, match="nested too deeply"):  # JSON that Python reads, and functions could not walk
        parse_json("[" * 101 + "]" * 101)
    assert parse_json("[" * 100 + "]" * 100)
    (tmp_path / MANIFEST_FILE).write_text(BRACKETS)
    with pytest.raises(DamagedCheckpoint, match="nested too deeply"):
        read_manifest(tmp_path)
    (tmp_path / "status.json").write_text(BRACKETS)
    with pytest.raises(EnvironmentProblem, match="nested too deeply"):
        read_mapping(tmp_path / "status.json")


@pytest.mark.parametrize("name", ["config.json", "adapter_config.json", "model.safetensors.index.json"])
def test_a_model_folder_is_bounded(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(BRACKETS)
    with pytest.raises(CheckpointError, match=rf"{name} cannot be read: nested too deeply"):
        read_json(tmp_path / name)
    header = BRACKETS.encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match="nested too deeply"):
        read_header(tmp_path / "model.safetensors")


def test_the_arguments_of_a_call_are_bounded() -> None:
    call = {"function": {"name": "add", "arguments": BRACKETS}}
    [message] = plain_messages([{"role": "assistant", "content": "", "tool_calls": [call]}], (), CALL_FORMS[0])
    assert message["tool_calls"][0]["function"]["arguments"] == BRACKETS


@given(st.text(), st.integers(1, 20))
def test_a_shortened_text_is_whole_or_marked(text: str, most: int) -> None:
    start, end = shorten(text, most), shorten(text, most, end=True)
    if len(text) <= most:
        assert start == end == text
    else:
        assert text.startswith(start[:-1]) and text.endswith(end[1:])
        assert start[-1] == end[0] == "…" and len(start) == len(end) == most + 1
