"""The guard of a user's command: kills all that it has started when it ends, or when the runner does.

python guarded_command.py CONNECTION COMMAND …: CONNECTION is a descriptor whose other end the runner holds.
"""

from __future__ import annotations

import os
import sys

from runner.user_code.worker import run_guarded


def main(connection: str, *command: str) -> int:
    """The exit code of the command, 128 + N for a signal; see `run_guarded`."""

    def execute() -> int:
        os.close(int(connection))
        try:
            os.execvp(command[0], command)
        except OSError as error:
            print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
            os._exit(127)

    return run_guarded(execute, int(connection), ())


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
