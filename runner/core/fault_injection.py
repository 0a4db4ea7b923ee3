"""Named instants at which a test makes the process die or an operation fail; free when the variable is unset.

RUNNER_FAILPOINT=checkpoint.before_rename:kill      SIGKILL there
RUNNER_FAILPOINT=checkpoint.write:ENOSPC            OSError there, with any name of `errno`
"""

from __future__ import annotations

import errno
import os
import signal


def failpoint(name: str) -> None:
    """Do what RUNNER_FAILPOINT asks for at `name`: nothing, unless it names this instant."""
    where, _, action = os.environ.get("RUNNER_FAILPOINT", "").partition(":")
    if where != name:
        return
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    code = getattr(errno, action)
    raise OSError(code, os.strerror(code))
