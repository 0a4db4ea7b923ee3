"""Disables transformers' progress bars and load reports, which would disturb the screen of the run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """No progress bar of transformers inside the block."""
    shown = is_progress_bar_enabled()
    disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            enable_progress_bar()  # type: ignore[no-untyped-call]


@contextmanager
def no_load_report() -> Iterator[None]:
    """No transformers' tables of mismatched keys, which are errors or automatic choices here."""
    library = logging.getLogger("transformers")
    before = library.level
    library.setLevel(logging.ERROR)
    try:
        yield
    finally:
        library.setLevel(before)
