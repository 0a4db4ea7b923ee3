"""What a program is handed by who starts it through runner.launch.child."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from runner.launch.child import bound

REPORT = "import signal; print(sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())))"


def test_a_signal_that_the_parent_blocks_reaches_the_program() -> None:
    """Ray blocks SIGINT in its workers: a rank that inherits that never hears of Ctrl-C."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        said = [subprocess.check_output(words, text=True) for words in ([sys.executable, "-c", REPORT], _bound())]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert "SIGINT" in said[0]  # handed down, without child.py
    assert said[1] == "[]\n"


def test_the_program_is_the_child_itself() -> None:
    command = bound([sys.executable, "-c", "import os; print(os.getpid(), os.getppid())"])
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.communicate()[0].split() == [str(process.pid), Path("/proc/self").resolve().name]


def _bound() -> list[str]:
    return bound([sys.executable, "-c", REPORT])
