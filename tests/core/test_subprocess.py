"""Child processes: what they inherit, how they end, and the messages that parent and child exchange."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path

import pytest

from runner.core import subprocess as processes
from runner.core.subprocess import ChildProcess, JsonLines, descendants, kill_session, process_identity, with_pdeathsig
from tests.launch.several import ROOT, gone

REPORT = "import signal; print(sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())))"
SHARES = """
import os, sys, time
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
shared = SharedMemory(create=True, size=4096)
tracker = Path(f"/proc/{resource_tracker._resource_tracker._pid}/cmdline")
while b"resource_tracker" not in tracker.read_bytes():  # until then it is a copy of this process
    time.sleep(0.001)
print(shared.name, flush=True)
if sys.argv[1] == "dead":
    os.kill(os.getpid(), 9)
time.sleep(100)
"""
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(100)"
STARTS = """
import signal, subprocess, time
ways = ({}, {"process_group": 0}, {"start_new_session": True})
sleeping = [subprocess.Popen(["sleep", "100"], **way) for way in ways]
print(*(one.pid for one in sleeping), flush=True)
time.sleep(100)
"""
PARENT = """
import os, signal, sys, time
from runner.core.subprocess import ChildProcess
child = ChildProcess(["sleep", "100"], end_signal=signal.SIGKILL)
time.sleep(0.3)  # until it is the program: before that it ends by itself
print(child.pid, flush=True)
time.sleep(100)
"""
ECHO = """
import time
from runner.core.subprocess import JsonLines
lines = JsonLines.to_parent()
print("printed")
while (messages := lines.receive(10)) is not None:
    for message in messages:
        lines.send({"echo": message})
"""


# --- start -----------------------------------------------------------------------------------------------------------


def test_a_signal_that_the_parent_blocks_reaches_the_program() -> None:
    """Ray blocks SIGINT in its workers: a rank that inherits that never hears of Ctrl-C."""
    command = [sys.executable, "-c", REPORT]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        said = [subprocess.check_output(words, text=True) for words in (command, with_pdeathsig(command))]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert "SIGINT" in said[0]  # inherited, where nothing is done about it
    assert said[1] == "[]\n"


def test_the_program_is_the_child_itself() -> None:
    command = [sys.executable, "-c", "import os; print(os.getpid(), os.getppid(), os.getsid(0))"]
    with ChildProcess(command, end_signal=signal.SIGTERM, stdout=subprocess.PIPE) as process:
        said = process.communicate()[0].split()
    assert [int(word) for word in said] == [process.pid, os.getpid(), process.pid]


def test_a_child_ends_with_a_parent_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert process_identity(pid) is not None
        parent.kill()
    assert gone([pid])


# --- end -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leader", ["alive", "dead"])
def test_of_a_session_that_is_killed_no_shared_memory_is_left(leader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "SETTLE_S", 60.0)
    with ChildProcess([sys.executable, "-c", SHARES, leader], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        shared = Path("/dev/shm", process.stdout.readline().decode().strip())
        if leader == "dead":
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # and not reaped, as a launcher does it
        else:
            assert shared.exists()
        kill_session(process.pid)
        assert gone([process.pid]) and not shared.exists()


@pytest.mark.parametrize(("program", "code"), [("sleep", -signal.SIGTERM), (DEAF, -signal.SIGKILL)])
def test_a_child_that_is_told_to_end_is_killed_after_its_grace(program: str, code: int) -> None:
    command = ["sleep", "100"] if program == "sleep" else [sys.executable, "-c", program]
    with ChildProcess(command, stdout=subprocess.PIPE) as process:
        if program != "sleep":
            assert process.stdout is not None
            process.stdout.readline()
        assert process.stop(0.3 if code == -signal.SIGKILL else 60) == code


def test_what_a_child_started_in_its_session_ends_with_it_and_the_rest_is_found() -> None:
    with ChildProcess([sys.executable, "-c", STARTS], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        inside, group, outside = map(int, process.stdout.readline().split())
        below = descendants(process.pid)
        assert {one.pid for one in below} == {inside, group, outside}
        process.send_signal(signal.SIGKILL)  # to itself alone
        assert process.ends_within(60) and process.returncode == -signal.SIGKILL
        assert gone([inside, group]) and process_identity(outside) is not None
        os.kill(outside, signal.SIGKILL)


def test_several_threads_find_the_end_of_a_child() -> None:
    ends: list[bool] = []
    for _ in range(10):
        with ChildProcess(["sleep", "0.02"]) as process:

            def wait(process: ChildProcess = process) -> None:
                while process.is_running():
                    pass
                ends.append(process.returncode == 0)

            threads = [threading.Thread(target=wait) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    assert ends == [True] * 30


def test_signals_that_come_while_a_child_is_waited_for_are_sent_to_it() -> None:
    with ChildProcess(["sleep", "100"]) as process:
        assert process.wait_and_forward([signal.SIGTERM]) == -signal.SIGTERM


# --- messages --------------------------------------------------------------------------------------------------------


def next_message(lines: JsonLines) -> object:
    """A message may come in parts, each of which ends one `receive`."""
    while not (messages := lines.receive(10)):
        assert messages is not None
    [message] = messages
    return message


def test_messages_of_any_size_come_back_whole_and_what_is_printed_is_none() -> None:
    command, pipe = [sys.executable, "-c", ECHO], subprocess.PIPE
    with ChildProcess(command, stdin=pipe, stdout=pipe, stderr=pipe, env={**os.environ, "PYTHONPATH": str(ROOT)}) as it:
        assert it.stdin is not None and it.stdout is not None and it.stderr is not None
        lines = JsonLines(it.stdout.fileno(), it.stdin.fileno())
        for message in ("short", ["x" * 10**6], {"line\n": None}):
            assert lines.send(message, 60) and next_message(lines) == {"echo": message}
        it.stdin.close()
        assert lines.receive(60) is None
        assert it.wait() == 0 and it.stderr.read() == b"printed\n"


def test_what_is_left_of_a_large_message_is_not_copied_for_each_part() -> None:
    here, there = socket.socketpair()
    with here, there:
        lines, message, got = JsonLines(writing=there.fileno()), b"1" * 2**22 + b"\n", bytearray(2**22 + 1)
        reader = threading.Thread(target=lambda: here.recv_into(got, 0, socket.MSG_WAITALL))
        reader.start()
        tracemalloc.start()
        try:
            assert lines.write(message, 60)
            assert tracemalloc.get_traced_memory()[1] < len(message) / 4
        finally:
            tracemalloc.stop()
        reader.join()
        assert got == message


def test_a_deadline_may_be_longer_than_poll_knows() -> None:
    here, there = socket.socketpair()
    with here, there:
        there.sendall(b"1\n")
        assert JsonLines(here.fileno(), here.fileno()).receive(1e9) == [1]


def test_nobody_is_waited_for_longer_than_the_deadline() -> None:
    here, there = socket.socketpair()
    with here, there:
        lines = JsonLines(here.fileno(), here.fileno())
        begin = time.monotonic()
        assert lines.receive(0.05) == []
        with pytest.raises(TimeoutError):
            lines.send("x" * 10**7, 0.05)
        assert time.monotonic() - begin < 60
        there.close()
        assert not lines.send("more")
        assert lines.receive(1) is None


def test_messages_before_a_broken_line_are_not_lost() -> None:
    reading, writing = os.pipe()
    lines = JsonLines(reading)
    os.write(writing, b'{"verdict": 1}\nxx\n')
    assert lines.receive(1.0) == [{"verdict": 1}]
    for _ in range(2):
        with pytest.raises(ValueError):
            lines.receive(1.0)
    os.close(reading)
    os.close(writing)
    with pytest.raises(ValueError, match="more than 4 bytes"):
        JsonLines(longest_bytes=4).parse(b"12345")


def test_after_a_send_that_timed_out_half_way_no_message_continues_the_torn_line() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        line = JsonLines(ours.fileno(), ours.fileno())
        with pytest.raises(TimeoutError):
            line.send("x" * 10_000_000, 0.05)
        assert line.send({"next": 1}, 0.05) is False and line.receive() is None
        other = JsonLines(theirs.fileno(), theirs.fileno())
        while (messages := other.receive(1.0)) is not None:
            assert messages == []


def test_a_send_that_timed_out_before_it_began_leaves_the_connection_open() -> None:
    reading, writing = os.pipe()
    line = JsonLines(writing=writing)
    os.set_blocking(writing, False)
    sent = os.write(writing, b" " * 10_000_000)
    with pytest.raises(TimeoutError):
        line.send(1, 0.05)
    os.read(reading, sent)
    assert line.send(2) is True and os.read(reading, 9) == b"2\n"
    os.close(reading), os.close(writing)


def test_a_program_that_is_not_there_is_an_error_of_its_starter(tmp_path: Path) -> None:
    for words in (["no-such-program"], [str(tmp_path / "none")], ["./none"]):
        with pytest.raises(FileNotFoundError, match=words[0]):
            ChildProcess(words, end_signal=signal.SIGTERM, cwd=str(tmp_path))
    ChildProcess(["true"], end_signal=signal.SIGTERM).stop(60)
