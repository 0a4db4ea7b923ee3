"""What recomputing and offloading save on the simulated card, by its own allocator; they change no gradient."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
pytestmark = pytest.mark.timeout(600)  # the first test builds the simulator


@pytest.mark.slow
def test_each_way_takes_less_and_computes_the_same(child: Any) -> None:
    found = json.loads(child(HERE / "activations.py").splitlines()[-1])
    assert [name for name, one in found.items() if not one["same"]] == []
    taken = {name: one["bytes"] / found["none"]["bytes"] for name, one in found.items()}
    order = ["none", "every second", "selective", "full", "full, offloaded"]
    assert sorted(order, key=lambda name: -taken[name]) == order, taken
    assert taken["every second"] < 0.65 and taken["selective"] < 0.55 and taken["full"] < 0.25, taken
    inputs = 512 * 64 * 4  # bytes of what goes into a layer: tokens × hidden size in float32; the last one is back soon
    saved = found["full"]["bytes"] - found["full, offloaded"]["bytes"]
    assert saved == pytest.approx(7 * inputs, rel=0.02)
    assert taken["every second, offloaded"] < taken["every second"]
