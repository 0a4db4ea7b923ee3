"""Sketches: their definition, what distance they tell, and that one wrong number among many is seen."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runner.tools.parity import recording as module
from runner.tools.parity.recording import WIDTH, first_tensor, sketch_tensor


def numbers(size: int, seed: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def test_it_is_the_signed_sums_of_every_width_th_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE", 2 * WIDTH)
    module._signs.cache_clear()
    tensor = numbers(5 * WIDTH + 3, 0).reshape(-1, 1)
    wanted = np.zeros(WIDTH)
    for place, value in enumerate(tensor.double().flatten().tolist()):
        wanted[place % WIDTH] += value * module._signs(place // (2 * WIDTH))[place % (2 * WIDTH)]
    found = sketch_tensor(tensor)
    module._signs.cache_clear()
    assert found.shape == (5 * WIDTH + 3, 1)
    assert found.norm == pytest.approx(float(tensor.double().norm()), rel=1e-12)
    np.testing.assert_allclose(found.sums, wanted, rtol=1e-12, atol=1e-12)


def test_signs_are_the_same_on_every_machine_and_half_of_them_are_negative() -> None:
    signs = module._signs(0)
    assert set(signs.tolist()) == {-1, 1} and abs(int(signs.sum())) < 5 * math.sqrt(len(signs))
    assert (signs[:16] > 0).astype(int).tolist() == [1, 0, 1, 1, 1, 0, 1, 0, 1, 0, 0, 0, 1, 1, 0, 1]
    assert not np.array_equal(signs, module._signs(1))


@given(st.integers(1, 40 * WIDTH), st.integers(0, 2**31), st.floats(-6, 0))
def test_the_distance_of_two_sketches_is_that_of_the_tensors(size: int, seed: int, power: float) -> None:
    one, noise = numbers(size, seed).double(), 10**power * numbers(size, seed + 1).double()
    wanted = float(noise.norm())
    found = sketch_tensor(one).distance(sketch_tensor(one + noise))
    assert found == pytest.approx(wanted, rel=1e-6 if size <= WIDTH else 0.25)


@given(st.integers(1, 20 * WIDTH), st.data())
def test_one_wrong_number_is_seen_wherever_it_is(size: int, data: st.DataObject) -> None:
    tensor = numbers(size, 3)
    wrong = tensor.clone()
    wrong[data.draw(st.integers(0, size - 1))] += 0.5
    assert sketch_tensor(tensor).distance(sketch_tensor(wrong)) == pytest.approx(0.5, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_type_and_layout_is_taken_as_the_numbers_that_it_holds(dtype: torch.dtype) -> None:
    tensor = numbers(600, 1).to(dtype).reshape(20, 30).T
    assert sketch_tensor(tensor).distance(sketch_tensor(tensor.double().contiguous())) == 0


def test_another_shape_and_what_is_not_finite_are_infinitely_far() -> None:
    tensor = numbers(12, 0)
    assert sketch_tensor(tensor).distance(sketch_tensor(tensor.reshape(3, 4))) == math.inf
    assert sketch_tensor(tensor).distance(sketch_tensor(tensor * torch.nan)) == math.inf
    assert sketch_tensor(torch.empty(0)).distance(sketch_tensor(torch.empty(0))) == 0


def test_the_first_tensor_is_that_of_floating_point_or_none() -> None:
    tensor = numbers(2, 0)
    assert first_tensor(tensor) is tensor and first_tensor((None, tensor, tensor)) is tensor
    assert first_tensor({"a": None, "b": tensor}) is tensor
    assert first_tensor(torch.tensor([1])) is None and first_tensor(()) is None and first_tensor("text") is None
