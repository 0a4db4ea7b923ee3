"""Of all that the ranks of a job say as it ends, the cause."""

from __future__ import annotations

import random
import signal

import pytest

from runner.core.errors import DataError, DeadlineExceeded, Interrupted, RankLost, RunnerError
from runner.launch.exit_cause import ProcessExit, find_cause
from runner.launch.heartbeat import ExitReport
from runner.launch.worker_process import main_thread_location


def rank(number: int, code: int, error: RunnerError | None = None, when: float = 0, ours: bool = False) -> ProcessExit:
    report = None if error is None else ExitReport.from_error(error)._replace(when=when)
    return ProcessExit(f"rank {number} of 4", code, report, f"ranks/{number}.log", ours)


GOOD = rank(0, 0)
KILLED = rank(1, -signal.SIGKILL)
OURS = rank(2, -signal.SIGKILL, ours=True)
DATA = rank(2, 3, DataError("line 7 is no JSON"), when=5)
LATER = rank(3, 3, DataError("another mistake"), when=6)
WAITED = rank(3, 75, RankLost("rank 3 of 4 lost another rank"), when=1)
STOPPED = rank(0, 130, Interrupted(signal.SIGINT, "SIGINT after step 3 of 9; a checkpoint was written"))


@pytest.mark.parametrize(
    ("ranks", "code", "said"),
    [
        ([GOOD, KILLED, OURS, WAITED, DATA], 75, "rank 1 of 4 was killed (SIGKILL)\n"),
        ([DATA, LATER, WAITED, OURS], 3, "rank 2 of 4: line 7 is no JSON"),
        ([STOPPED, WAITED, OURS], 130, "SIGINT after step 3 of 9"),
        ([STOPPED, DATA], 3, "rank 2 of 4: line 7"),
        ([WAITED, OURS, GOOD], 75, "rank 3 of 4 lost another rank"),
        ([rank(1, -signal.SIGSEGV), GOOD], 75, "rank 1 of 4 was killed (SIGSEGV)\n  a library"),
        ([rank(0, 3, DataError("rank 2: line 7 is no JSON")), OURS], 3, "rank 2: line 7 is no JSON"),
        ([rank(1, -35), GOOD], 75, "rank 1 of 4 was killed (signal 35)"),
        ([rank(1, 1), GOOD], 1, "rank 1 of 4 exited with code 1 and no message; see ranks/1.log"),
    ],
)
def test_what_explains_most_is_the_cause_in_whatever_order(ranks: list[ProcessExit], code: int, said: str) -> None:
    for seed in range(5):
        random.Random(seed).shuffle(ranks)
        verdict = find_cause(ranks)
        assert verdict is not None and verdict.message.startswith(said)
        assert verdict.to_error().exit_code == code


def test_all_well() -> None:
    assert find_cause([GOOD, GOOD]) is None


def test_an_end_that_all_were_told_of_is_no_matter_of_one() -> None:
    other = rank(1, 130, Interrupted(signal.SIGINT, "SIGINT after step 3 of 9; a checkpoint was written"))
    verdict = find_cause([STOPPED, other], [signal.SIGINT])
    assert verdict is not None and isinstance(verdict.to_error(), Interrupted)
    assert str(verdict.to_error()).startswith("SIGINT after step 3")


@pytest.mark.parametrize("last", [rank(0, -signal.SIGTERM), rank(0, 143), rank(0, 130), OURS])
def test_a_rank_that_ends_of_the_signals_that_were_passed_on_was_interrupted(last: ProcessExit) -> None:
    verdict = find_cause([last, GOOD], [signal.SIGTERM, signal.SIGINT])
    assert verdict is not None and isinstance(verdict.to_error(), Interrupted)
    assert (verdict.to_error().exit_code, str(verdict.to_error())) == (143, "SIGTERM: stopped immediately")
    assert "Interrupted" not in repr(find_cause([last]))


def test_a_report_survives_its_way() -> None:
    report = ExitReport.from_error(DeadlineExceeded("late"))
    assert (report.kind, report.exit_code) == ("waited", 6) and ExitReport.from_error(DataError("x")).kind == "error"


def test_the_place_of_a_hang_is_that_of_the_main_thread_outside_libraries() -> None:
    stacks = f"""
Thread 0x00007f (most recent call first):
  File "{threading_file()}", line 1 in wait
Current thread 0x00007e (most recent call first):
  File "{threading_file()}", line 355 in wait
  File "reward.py", line 12 in score
  File "loop.py", line 5 in run
"""
    assert main_thread_location(stacks) == "at reward.py:12, in score"
    assert main_thread_location("a line that was there before") == ""


def threading_file() -> str:
    import threading

    return str(threading.__file__)
