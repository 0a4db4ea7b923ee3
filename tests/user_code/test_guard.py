"""The process that guards a user's code tells how that ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from runner.user_code import guarded_command


def test_the_exit_code_is_told_where_an_end_is_asked_for_too(tmp_path: Path) -> None:
    """As on a busy machine, where the runner ends a guard before it has noticed that its child ended."""
    reading, writing = os.pipe()
    script = f"until [ -e {tmp_path}/go_on ]; do sleep 0.01; done; exit 4"
    command = [sys.executable, "-P", str(guarded_command.__file__), str(reading), "sh", "-c", script]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, pass_fds=[reading], env=environment) as guard:
        try:
            while not (children := psutil.Process(guard.pid).children()):
                time.sleep(0.01)
            guard.send_signal(signal.SIGSTOP)
            while psutil.Process(guard.pid).status() != psutil.STATUS_STOPPED:
                time.sleep(0.01)
            (tmp_path / "go_on").touch()
            while children[0].status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.01)
            guard.send_signal(signal.SIGTERM)
            guard.send_signal(signal.SIGCONT)
            assert guard.wait(60) == 4
        finally:
            guard.kill()
            os.close(reading)
            os.close(writing)
