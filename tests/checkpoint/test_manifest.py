"""The manifest comes back as it was, and every change to it is noticed."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.checkpoint import format
from runner.checkpoint.format import DamagedCheckpoint, FileRecord, Manifest
from runner.core.errors import CheckpointError

EXAMPLE = Manifest(100, "2030-01-02T03:04:05+00:00", {"eval/x": 0.25}, {"state.json": FileRecord(3, "ab" * 16)})


def put(folder: Path, content: bytes) -> None:
    (folder / format.MANIFEST_FILE).write_bytes(content)


@given(st.dictionaries(st.text(), st.floats(), max_size=4), st.integers(0, 10**9))
def test_it_comes_back_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, metrics: dict[str, float], step: int
) -> None:
    folder = tmp_path_factory.mktemp("m")
    put(folder, format.encode_manifest(Manifest(step, "now", metrics, EXAMPLE.files)))
    back = format.read_manifest(folder)
    assert (back.step, back.files, back.metrics.keys()) == (step, EXAMPLE.files, metrics.keys())
    assert all(repr(back.metrics[k]) == repr(v) for k, v in metrics.items())  # NaN, infinity and -0.0 too


def test_it_is_strict_json(tmp_path: Path) -> None:
    content = format.encode_manifest(Manifest(1, "now", {"a": math.nan, "b": -math.inf}, {}))
    text = json.loads(content, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert text["metrics"] == {"a": "nan", "b": "-inf"}


def test_every_flipped_bit_is_noticed_or_changes_nothing(tmp_path: Path) -> None:
    content = format.encode_manifest(EXAMPLE)
    for position in range(len(content) * 8):
        damaged = bytearray(content)
        damaged[position // 8] ^= 1 << position % 8
        put(tmp_path, bytes(damaged))
        try:
            assert format.read_manifest(tmp_path) == EXAMPLE, position  # white space only
        except DamagedCheckpoint:
            continue


@pytest.mark.parametrize("length", [0, 1, 50, -2])
def test_a_cut_manifest_is_damaged(tmp_path: Path, length: int) -> None:
    put(tmp_path, format.encode_manifest(EXAMPLE)[:length])
    with pytest.raises(DamagedCheckpoint, match=r"MANIFEST\.json"):
        format.read_manifest(tmp_path)


@pytest.mark.parametrize("content", [b"[]", b"null", b"{}", b"\xff\xfe", b"3", b'"x"'])
def test_json_that_is_no_manifest_is_damaged(tmp_path: Path, content: bytes) -> None:
    put(tmp_path, content)
    with pytest.raises(DamagedCheckpoint, match=r"MANIFEST\.json"):
        format.read_manifest(tmp_path)


def resealed(**changes: object) -> bytes:
    """A manifest with other fields and a right digest, as another program could write it."""
    body = json.loads(format.encode_manifest(EXAMPLE))
    del body["digest"]
    body |= changes
    return json.dumps(body | {"digest": format._manifest_digest(body)}).encode()


def test_a_newer_schema_says_what_is_needed(tmp_path: Path) -> None:
    put(tmp_path, resealed(schema=3, anything={"new": 1}))
    with pytest.raises(CheckpointError, match="checkpoint schema 3; this runner reads up to 2") as caught:
        format.read_manifest(tmp_path)
    assert not isinstance(caught.value, DamagedCheckpoint)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"step": "one"}, "step"),
        ({"files": {"../../etc/passwd": {"bytes": 1, "sha256": ""}}}, "not the name of a file in its folder"),
        ({"files": {"a": {"bytes": 1}}}, "a has no digest"),
        ({"files": {"a": {"xxh128": "ab"}}}, "bytes"),
        ({"metrics": {"a": "much"}}, "metrics"),
    ],
)
def test_fields_are_checked(tmp_path: Path, changes: dict[str, object], says: str) -> None:
    put(tmp_path, resealed(**changes))
    with pytest.raises(DamagedCheckpoint, match=says):
        format.read_manifest(tmp_path)
