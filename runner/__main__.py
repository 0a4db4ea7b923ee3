"""`python -m runner` is the command `run`."""

from __future__ import annotations

import sys

from runner.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
