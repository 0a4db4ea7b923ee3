"""Stands between this process and a program that it starts: ties their lives, pins cores, and becomes the program.

bound(command) ─▶ python child.py PARENT SIGNAL CORES PROGRAM ARGUMENTS…      CORES: 0,1 or - for all

Linux sends the signal set here when the parent ends, however that happens: at SIGTERM a run saves, and ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1


def bound(command: Sequence[str], cores: Sequence[str] = (), ending: int = signal.SIGTERM) -> list[str]:
    """The command that runs `command` for as long as this process lives, on these cores (none: on all).

    ending: the signal that it is sent when this process has ended
    """
    own = [str(os.getpid()), str(int(ending)), ",".join(cores) or "-"]
    return [sys.executable, "-I", "-S", __file__, *own, *command]


def main(parent: str, ending: str, cores: str, *command: str) -> None:
    """Replace this process by the program; ends at once if the parent has ended by now."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(ending)) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != int(parent):
        sys.exit(128 + int(ending))
    if cores != "-":
        os.sched_setaffinity(0, map(int, cores.split(",")))
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray blocks SIGINT in all that it starts, which hands that down
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
