"""What samplers did between two steps, as numbers."""

from __future__ import annotations

from runner.sampler.server.pool_metrics import SUMS, PoolMetrics

NONE = dict.fromkeys(SUMS, 0.0)


def test_devices_are_the_mean_load_and_the_fullest_memory_until_they_are_measured_again() -> None:
    metrics = PoolMetrics()
    metrics.record_device("a", {"utilization_percent": 20.0, "memory_used_bytes": 5.0})
    metrics.record_device("b", {"utilization_percent": 90.0, "memory_used_bytes": 7.0, "power_w": 300.0})
    metrics.record_device("a", {"utilization_percent": 40.0})
    metrics.record_device("a", {})  # nothing was measured since
    assert metrics.pop() == NONE | {"utilization_percent": 65.0, "memory_used_bytes": 7.0, "power_w": 300.0}
    assert metrics.pop() == NONE
