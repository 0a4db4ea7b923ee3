"""Recordings as files: what is written is read, and nothing else is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from runner.core.errors import DataError, EnvironmentProblem, StorageError
from runner.tools.parity import recording
from runner.tools.parity.recording import Recording, TensorSketch, read, write

EXPERIENCE = {"step": 0, "groups": ["a\nb"], "tensors": {"ids": torch.tensor([1, 2]), "logprobs": torch.tensor([-0.1])}}
SAMPLE = Recording(
    {"name": "x", "model": {"dtype": "float32"}},
    {"device": {"name": "cpu"}},
    ({"train/loss": 0.1 + 0.2, "nll": float("nan")},),
    {
        "output/policy/b": TensorSketch((2, 3), 1.5, np.arange(4.0)),
        "output/policy/a": TensorSketch((), 0.0, np.zeros(4)),
    },
    (EXPERIENCE,),
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write(path, SAMPLE)
    found = read(path)
    assert (found.spec, found.made, list(found.prints)) == (SAMPLE.spec, SAMPLE.made, list(SAMPLE.prints))
    assert found.steps[0]["train/loss"] == 0.1 + 0.2 and np.isnan(found.steps[0]["nll"])
    for name, one in SAMPLE.prints.items():
        assert (found.prints[name].shape, found.prints[name].norm) == (one.shape, one.norm)
        assert np.array_equal(found.prints[name].sums, one.sums)
    [experience] = found.experiences
    assert experience["groups"] == ["a\nb"] and experience["step"] == 0
    for name, tensor in EXPERIENCE["tensors"].items():
        assert torch.equal(torch.from_numpy(experience["tensors"][name]), tensor)
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recordings") / "whole.safetensors"
    write(path, SAMPLE)
    return path


@given(data=st.data())
def test_any_changed_or_missing_byte_is_refused(whole: Path, data: st.DataObject) -> None:
    content = bytearray(whole.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    damaged = whole.with_name("damaged.safetensors")
    damaged.write_bytes(content)
    # A header that spells the same JSON in another way is the same recording.
    try:
        read(damaged)
    except DataError:
        return
    assert _meaning(damaged) == _meaning(whole)


@given(data=st.data())
def test_a_cut_file_is_refused(whole: Path, data: st.DataObject) -> None:
    content = whole.read_bytes()
    cut = whole.with_name("cut.safetensors")
    cut.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(DataError, match="record again"):
        read(cut)


def _meaning(path: Path) -> tuple[object, bytes]:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    return header, content[8 + length :]


def test_no_file_another_file_and_another_format_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EnvironmentProblem, match="no such file; to record one, type"):
        read(tmp_path / "none")
    save_file({"weight": np.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(DataError, match="safetensors, but not a recording"):
        read(tmp_path / "model.safetensors")
    monkeypatch.setattr(recording, "FORMAT", 3)
    write(tmp_path / "newer", SAMPLE)
    monkeypatch.undo()
    with pytest.raises(DataError, match="has format 3, but this version reads 2"):
        read(tmp_path / "newer")


def test_a_disk_that_refuses_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    path.write_text("old")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recording.fsync_io, "write_new", full)
    with pytest.raises(StorageError, match="No space left"):
        write(path, SAMPLE)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a", "old")]
