"""Processor time of each test, and the record of the last full run of each make target.

pytest --times              after the run: the twenty tests and the folders that took most processor time
pytest --record test-all    after a run without failures: write date, commit and counts to tests/last_runs.json
python tests/run_record.py  warn of the make targets that were last run in full long ago
"""

from __future__ import annotations

import json
import subprocess
import time
from collections import defaultdict
from collections.abc import Generator
from datetime import date
from multiprocessing.forkserver import _forkserver
from pathlib import Path

import psutil
import pytest

RECORD = Path(__file__).with_name("last_runs.json")
TARGETS = ("test", "test-all", "test-deepspeed", "test-vllm", "soak")
MAX_AGE_DAYS = 30
SLOWEST = 20
_started = pytest.StashKey[float]()
_session_started = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("run record")
    group.addoption("--times", action="store_true", help="print the slowest tests and folders by processor time")
    group.addoption("--record", metavar="TARGET", help="write the counts of this run to tests/last_runs.json")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_session_started] = time.time()


def _cpu_s() -> float:
    """Processor seconds of this process, of its fork server and of the child processes of both that have ended."""
    processes = [psutil.Process()]
    if server := _forkserver._forkserver_pid:
        processes.append(psutil.Process(server))
    return sum(sum(process.cpu_times()[:4]) for process in processes)


def pytest_unconfigure() -> None:
    """Wait for the fork server, or the time of what it started would be missing from `time make test`."""
    _forkserver._stop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    item.stash[_started] = _cpu_s()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "teardown":
        report.user_properties.append(("cpu_s", _cpu_s() - item.stash[_started]))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    reports = [r for rs in terminalreporter.stats.values() for r in rs if getattr(r, "when", None) == "teardown"]
    cpu_s = {r.nodeid: dict(r.user_properties)["cpu_s"] for r in reports}
    if config.getoption("--times"):
        _print_times(terminalreporter, cpu_s)
    if (target := config.getoption("--record")) and terminalreporter._session.exitstatus == 0:
        counts = {name: len(terminalreporter.stats.get(name, [])) for name in ("passed", "skipped")}
        _write_record(target, counts | {"wall_s": round(time.time() - config.stash[_session_started])})


def _print_times(out: pytest.TerminalReporter, cpu_s: dict[str, float]) -> None:
    out.section(f"the {SLOWEST} slowest tests, processor seconds")
    for name in sorted(cpu_s, key=cpu_s.__getitem__, reverse=True)[:SLOWEST]:
        out.write_line(f"{cpu_s[name]:8.1f}  {name}")
    folders: defaultdict[str, list[float]] = defaultdict(list)
    for name, seconds in cpu_s.items():
        folders["/".join(name.split("::")[0].split("/")[:2])].append(seconds)
    out.section("folders, processor seconds, tests")
    for name in sorted(folders, key=lambda folder: sum(folders[folder]), reverse=True):
        out.write_line(f"{sum(folders[name]):8.1f} {len(folders[name]):6}  {name}")
    out.write_line(f"{sum(cpu_s.values()):8.1f} {len(cpu_s):6}  in all")


def _write_record(target: str, counts: dict[str, int]) -> None:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    runs = _read_record()
    runs[target] = {"date": str(date.today()), "commit": commit.stdout.strip(), **counts}
    RECORD.write_text(json.dumps(dict(sorted(runs.items())), indent=2) + "\n")


def _read_record() -> dict[str, dict[str, str | int]]:
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def old_runs(runs: dict[str, dict[str, str | int]], today: date) -> list[str]:
    """A warning for each target without a full run in the last MAX_AGE_DAYS days."""
    found = []
    for target in TARGETS:
        if (run := runs.get(target)) is None:
            found.append(f"warning: no full run of `make {target}` is recorded; type: make {target} RECORD=1")
        elif (age := (today - date.fromisoformat(str(run["date"]))).days) > MAX_AGE_DAYS:
            found.append(f"warning: `make {target}` was last run in full {age} days ago; type: make {target} RECORD=1")
    return found


if __name__ == "__main__":
    print("\n".join(old_runs(_read_record(), date.today())))
