"""Derived seeds: fixed for ever, different for different streams, and free of torch."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.core.rng import derive_seed

PART = st.one_of(st.integers(), st.text())


def test_the_values_never_change() -> None:
    """A change here would change every run's numbers: resume from an older version would no longer be exact."""
    for text, value in (("[0]", derive_seed(0)), ('[7,"dropout",3,1]', derive_seed(7, "dropout", 3, 1))):
        assert value == int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") // 2
    assert derive_seed(7, "dropout", 3, 1) == 6619326260587706060


@given(st.integers(min_value=0, max_value=2**63 - 1), st.lists(PART, max_size=4))
def test_it_is_a_63_bit_function_of_its_arguments(seed: int, parts: list[int | str]) -> None:
    assert derive_seed(seed, *parts) == derive_seed(seed, *parts)
    assert 0 <= derive_seed(seed, *parts) < 2**63


@given(st.lists(PART, max_size=4), st.lists(PART, max_size=4))
def test_different_names_are_different_streams(one: list[int | str], other: list[int | str]) -> None:
    same = [(type(p), p) for p in one] == [(type(p), p) for p in other]
    assert (derive_seed(0, *one) == derive_seed(0, *other)) == same


def test_names_that_read_alike_are_different_streams() -> None:
    names = [("a", 1), ("a1",), ("a", "1"), ("a,1",), ('a","1',), ("", "a", 1), ("a", 1, ""), ("a", -1), (1, "a")]
    seeds = {derive_seed(seed, *name) for seed in (0, 1, 10) for name in names}
    assert len(seeds) == 3 * len(names)


def test_neighboring_streams_are_unrelated() -> None:
    """Half the bits differ between steps, as between independent seeds."""
    flips = [(derive_seed(0, "dropout", s) ^ derive_seed(0, "dropout", s + 1)).bit_count() for s in range(500)]
    assert 30.5 < sum(flips) / len(flips) < 32.5
    assert len(set(chain.from_iterable((derive_seed(0, s), derive_seed(1, s)) for s in range(500)))) == 1000


@pytest.mark.parametrize("part", [1.0, True, None, b"x", (1,)])
def test_other_types_are_refused(part: object) -> None:
    with pytest.raises(TypeError, match="ints and strings"):
        derive_seed(0, part)  # type: ignore[arg-type]


def test_it_needs_no_torch() -> None:
    code = "import sys, runner.core.rng; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
