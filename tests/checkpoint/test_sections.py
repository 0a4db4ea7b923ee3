"""State comes back bit for bit, or is refused in words; nothing is changed on the way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from runner.checkpoint import format
from runner.checkpoint.save_plan import SavePlan, make_save_plan
from runner.core import safetensors_layout
from runner.core.errors import RunnerError, TrainingDiverged
from runner.distributed.work_partition import SINGLE_PROCESS

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,10}", fullmatch=True)
TENSOR_NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    seed = draw(st.integers(0, 2**31))
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(50)
    made = values.to(torch.int8) if dtype == torch.uint8 else values
    made = made.to(dtype)
    return made.mT if made.dim() >= 2 and draw(st.booleans()) else made


def section_of(values: dict[str, Any], tensors: dict[str, Tensor] | None) -> dict[str, Any]:
    plain = {k: v for k, v in values.items() if k != "tensors"}
    return plain if tensors is None else plain | {"tensors": tensors}


SECTIONS = st.builds(
    section_of,
    st.dictionaries(st.text(), VALUES, max_size=3),
    st.none() | st.dictionaries(TENSOR_NAMES, tensors(), max_size=3),
)


def agreed(state: dict[str, Any]) -> SavePlan:
    """What a single process writes."""
    return make_save_plan(lambda: format.split_state(state), SINGLE_PROCESS)


def round_trip(folder: Path, state: dict[str, Any]) -> dict[str, Any]:
    held = agreed(state)
    (folder / format.VALUES).write_bytes(held.values)
    for name, layout in held.layouts.items():
        safetensors_layout.create_file(folder / f"{name}.safetensors", layout)
        format.write_pieces(folder / f"{name}.safetensors", layout, held.pieces[name])
    return format.read_state(folder, {f"{name}.safetensors": None for name in held.layouts})


def refuse_infinite(state: dict[str, Any]) -> None:
    format.refuse_infinite(agreed(state).pieces)


def bits(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist())


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        left, right = dict(one[name]), dict(other[name])
        a, b = left.pop("tensors", None), right.pop("tensors", None)
        # As text: 1, 1.0 and True are equal in Python and differ here; -0.0 is not 0.0.
        assert json.dumps(left, sort_keys=True) == json.dumps(right, sort_keys=True)
        assert (a is None) == (b is None)
        assert (a or {}).keys() == (b or {}).keys()
        for key, tensor in (a or {}).items():
            assert (tensor.dtype, tensor.shape) == (b[key].dtype, b[key].shape)
            assert bits(tensor) == bits(b[key])


@given(st.dictionaries(NAMES, SECTIONS, max_size=3))
def test_any_state_comes_back_bit_for_bit(tmp_path_factory: pytest.TempPathFactory, state: dict[str, Any]) -> None:
    try:
        refuse_infinite(state)
    except TrainingDiverged:  # float8_e4m3fn has no infinity but a NaN, float16 overflows; refusal has its own test
        return
    assert_same(state, round_trip(tmp_path_factory.mktemp("state"), state))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 3)], ids=str)
def test_every_dtype_and_shape(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    state = {"policy": {"tensors": {"a": torch.ones(shape).to(dtype)}}}
    assert_same(state, round_trip(tmp_path, state))


def test_negative_zero_and_subnormals_keep_their_bits(tmp_path: Path) -> None:
    odd = torch.tensor([-0.0, 0.0, 1e-45, -1e-45, 3.4028235e38])
    state = {"policy": {"tensors": {"f": odd, "b": odd[:4].to(torch.bfloat16)}, "zero": -0.0, "third": 1 / 3}}
    assert_same(state, round_trip(tmp_path, state))


def test_tied_tensors_are_stored_once_and_come_back_tied(tmp_path: Path) -> None:
    weight = torch.randn(100, 100)
    state = {"policy": {"tensors": {"embed": weight, "head": weight, "view": weight.view(100, 100)}}}
    back = round_trip(tmp_path, state)
    assert_same(state, back)
    assert (tmp_path / "policy.safetensors").stat().st_size < 1.1 * weight.nbytes
    assert back["policy"]["tensors"]["head"] is back["policy"]["tensors"]["embed"]
    assert agreed(state).num_bytes < 1.1 * weight.nbytes


def test_overlapping_views_and_transposes(tmp_path: Path) -> None:
    base = torch.arange(12.0)
    views = {"low": base[:8], "high": base[4:], "t": base.view(3, 4).T, "step": base[::3], "row": base[:1].expand(5)}
    state = {"policy": {"tensors": views | {"grad": torch.ones(2, requires_grad=True)}}}
    assert_same(state, round_trip(tmp_path, state))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.float8_e5m2])
def test_a_tensor_that_is_not_finite_is_refused(bad: float, dtype: torch.dtype) -> None:
    tensor = torch.tensor([1.0, bad]).to(dtype)
    with pytest.raises(TrainingDiverged, match=r"policy: the tensor w has NaN or infinity"):
        refuse_infinite({"policy": {"tensors": {"ok": torch.zeros(2), "w": tensor}}})


@pytest.mark.parametrize(
    ("section", "where"),
    [
        ({"a": {"b": float("nan")}}, "callbacks.a.b"),
        ({"a": [1, float("inf")]}, r"callbacks.a\[1\]"),
        ({"a": {1: "int key"}}, "callbacks.a"),
        ({"a": {1, 2}}, "callbacks.a"),
        ({"a": b"bytes"}, "callbacks.a"),
        ({"a": torch.zeros(1)}, "callbacks.a"),
    ],
)
def test_a_value_that_json_would_change_is_refused_by_name(section: dict[str, Any], where: str) -> None:
    with pytest.raises(RunnerError, match=f"the state {where} = .* has no exact JSON form"):
        format.split_state({"callbacks": section})


def test_what_safetensors_cannot_hold_is_refused_before_anything_is_written() -> None:
    unfit = {
        "__metadata__": torch.zeros(1),
        "c": torch.zeros(1, dtype=torch.complex128),
        "m": torch.zeros(1, device="meta"),
        "n": 1.0,
    }
    for name, value in unfit.items():
        with pytest.raises(RunnerError, match="cannot be stored"):
            format.split_state({"policy": {"tensors": {name: value}}})


@pytest.mark.parametrize("name", ["../up", "a/b", "", ".hidden", "a\0b"])
def test_a_section_name_must_be_a_file_name(name: str) -> None:
    with pytest.raises(RunnerError, match="valid file name"):
        format.split_state({name: {}})


def test_tuples_become_lists(tmp_path: Path) -> None:
    assert round_trip(tmp_path, {"o": {"betas": (0.9, 0.95)}}) == {"o": {"betas": [0.9, 0.95]}}


def test_pieces_are_written_without_reading_what_others_write(tmp_path: Path) -> None:
    held = {"weight": torch.arange(6.0).reshape(2, 3), "step": torch.tensor(3)}
    path = tmp_path / "policy.safetensors"
    one = agreed({"policy": {"tensors": held}})
    layout = one.layouts["policy"]
    safetensors_layout.create_file(path, layout)
    whole = path.stat().st_size
    path.write_bytes(b"?" * whole)  # as a page that another machine has not sent yet
    format.write_pieces(path, layout, one.pieces["policy"])
    begin, end = (len(layout.head) + at for at in layout.byte_ranges["weight"])
    content = path.read_bytes()
    assert content[: len(layout.head)] == b"?" * len(layout.head) and len(content) == whole
    assert content[begin:end] == held["weight"].numpy().tobytes()
