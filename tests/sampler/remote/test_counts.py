"""What samplers did between two steps, as numbers."""

from __future__ import annotations

import json

import pytest

from runner.sampler.remote.remote import SUMS, Counts, Reply, UnansweredError

NONE = dict.fromkeys(SUMS, 0.0)
HELD = {"version": 3, "digest": "d", "session": "s"}


def test_devices_are_the_mean_load_and_the_fullest_memory_until_they_are_looked_at_again() -> None:
    counts = Counts()
    counts.watched(0, {"utilization_percent": 20.0, "memory_used_bytes": 5.0})
    counts.watched(1, {"utilization_percent": 90.0, "memory_used_bytes": 7.0, "power_w": 300.0})
    counts.watched(0, {"utilization_percent": 40.0})
    counts.watched(0, {})  # nobody has looked since
    assert counts.taken() == NONE | {"utilization_percent": 65.0, "memory_used_bytes": 7.0, "power_w": 300.0}
    assert counts.taken() == NONE


def test_an_answer_brings_what_the_device_does_and_need_not() -> None:
    said = json.dumps({"held": HELD, "result": [], "device": {"utilization_percent": 50}}).encode()
    assert Reply.of(said).device == {"utilization_percent": 50.0}
    assert Reply.of(json.dumps({"held": HELD, "result": []}).encode()).device == {}
    with pytest.raises(UnansweredError, match="is no answer"):
        Reply.of(json.dumps({"held": HELD, "device": {"utilization_percent": "much"}}).encode())
