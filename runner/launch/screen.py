"""Connects the standard library's logging to the screen and to run.log."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runner.tracker.console import Console

LOGGER = "runner"
RETRIES = "huggingface_hub.utils._http"


class _ToConsole(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.message(record.getMessage(), record.levelname.lower())


@contextmanager
def on_screen(path: Path, *, silent: bool = False) -> Iterator[Console]:
    """A console that also shows what is logged under "runner", and Python's warnings, until the block ends.

    silent: only in the log at `path`, as for the ranks that do not speak to the user
    """
    with open(os.devnull, "w") as nowhere:
        console = Console(path, nowhere if silent else None)
        with _listening(_ToConsole(console)):
            try:
                yield console
            finally:
                console.stop([])


@contextmanager
def _listening(handler: logging.Handler) -> Iterator[None]:
    """Hand the handler what is logged."""
    loggers = [logging.getLogger(LOGGER), logging.getLogger("py.warnings")]
    levels = {name: logging.getLogger(name).level for name in (LOGGER, RETRIES)}
    logging.captureWarnings(True)
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
    loggers[0].setLevel(logging.INFO)
    logging.getLogger(RETRIES).setLevel(logging.ERROR)  # five lines a file, before the error that says it all
    try:
        yield
    finally:
        logging.captureWarnings(False)
        for logger in loggers:
            logger.removeHandler(handler)
            logger.propagate = True
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
