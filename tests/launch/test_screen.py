"""The console of a run, and what it leaves of itself in the process."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from runner.launch.run_messages import RETRIES, console_logging


def logging_of(name: str) -> tuple[Any, ...]:
    logger = logging.getLogger(name)
    return logger.level, logger.propagate, tuple(logger.handlers)


def test_logging_is_afterwards_as_it_was_before(tmp_path: Path) -> None:
    names = ("runner", "py.warnings", RETRIES)
    before = [logging_of(name) for name in names]
    with console_logging(tmp_path / "run.log"):
        logging.getLogger("runner").info("a line")
        assert [logging_of(name) for name in names] != before
    assert [logging_of(name) for name in names] == before
    assert "a line" in (tmp_path / "run.log").read_text()
