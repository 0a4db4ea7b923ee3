"""What is said about samples without a score, and when a run stops because of them."""

from __future__ import annotations

import pytest

from runner.core.errors import DataError, EnvironmentProblem
from runner.interfaces.rewards import MOST_KINDS, GroupScores, ScoringFailure, ScoringFailures, unscored_group


def test_the_first_of_a_kind_is_said_and_all_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "runner")
    faults = ScoringFailures("reward=x", 100, "fix it")
    for i in range(5):
        faults.record_group(GroupScores([1.0, None], (ScoringFailure("odd", f"odd number {i}"),)))
    faults.record_group(unscored_group(3, "gone", "it went"))
    assert [r.message for r in caplog.records] == [
        "reward=x: not scored: odd number 0",
        "reward=x: not scored: it went",
    ]
    caplog.clear()
    faults.close()
    faults.close()
    assert [r.message for r in caplog.records] == ["reward=x: 8 of 13 samples could not be scored: 5 × odd; 3 × gone"]


def test_groups_without_a_score_stop_the_run_only_in_a_row() -> None:
    faults = ScoringFailures("reward=x", 3, "fix it", EnvironmentProblem)
    for scored in (
        unscored_group(2, "k", "m"),
        unscored_group(2, "k", "m"),
        GroupScores([None, 0.5], (ScoringFailure("k", "m"),)),
    ) * 2:
        assert faults.record_group(scored) == scored.values
    faults.record_group(unscored_group(2, "k", "m"))
    faults.record_group(GroupScores([]))  # an empty group says nothing
    faults.record_group(unscored_group(2, "k", "m"))
    with pytest.raises(EnvironmentProblem, match=r"reward=x: no sample of 3 groups in a row .*\n  why\n  fix it"):
        faults.record_group(unscored_group(2, "k", "why"))


def test_a_none_that_the_reward_chose_is_no_fault_and_counts_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    faults = ScoringFailures("reward=x", 2, "fix it", EnvironmentProblem)
    for _ in range(3):
        assert faults.record_group(GroupScores([None, None])) == [None, None]
        assert faults.record_group(GroupScores([None, 0.5])) == [None, 0.5]
    faults.close()
    assert not caplog.records
    faults.record_group(GroupScores([None, None]))
    with pytest.raises(
        DataError, match=r"no sample of 2 groups in a row .*\n  the reward returned None for every sample"
    ):
        faults.record_group(GroupScores([None, None]))


def test_what_is_said_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    faults = ScoringFailures("reward=x", 10_000, "fix it")
    for i in range(1000):
        faults.record_group(unscored_group(1, f"kind {i}", f"message {i}"))
    faults.close()
    assert len(caplog.records) == MOST_KINDS + 2  # "other reasons", and the sum
    assert "980 × other reasons" in caplog.records[-1].message
