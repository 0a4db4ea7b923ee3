"""The warning of full test runs that are long ago."""

from __future__ import annotations

from datetime import date
from pathlib import Path

from tests.run_record import TARGETS, old_runs

ROOT = Path(__file__).resolve().parent.parent


def test_missing_and_old_runs_are_named() -> None:
    runs: dict[str, dict[str, str | int]] = {name: {"date": "2026-01-31"} for name in TARGETS if name != "soak"}
    runs["test"] = {"date": "2026-03-02"}
    found = old_runs(runs, date(2026, 3, 2))
    assert [line for line in found if "30 days" in line] == []
    assert found == ["warning: no full run of `make soak` is recorded; type: make soak RECORD=1"]
    found = old_runs(runs, date(2026, 3, 3))
    assert len(found) == 4 and "`make test-all` was last run in full 31 days ago" in found[0]


def test_every_slow_test_of_ci_is_there() -> None:
    """A name that is gone fails here at once, and not in the twentieth minute of CI."""
    for line in (ROOT / "tests/ci_slow.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            path, _, name = line.partition("::")
            assert (ROOT / path).is_file(), line
            assert f"def {name.partition('[')[0]}" in (ROOT / path).read_text(), line
