"""Keeps progress bars and warnings of transformers and peft off the screen, which shows the run."""

from __future__ import annotations

import logging
import warnings
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


@contextmanager
def no_peft_warnings() -> Iterator[None]:
    """Without peft's warnings that a user cannot act on."""
    with warnings.catch_warnings():
        # peft calls transformers by an older name
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        # ranks that peft itself sets for experts, whose gate and up are one tensor
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys", RuntimeWarning)
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to False", UserWarning)  # peft corrects it
        # Each use names one.
        warnings.filterwarnings("ignore", "Adapter .* was active which is now deleted", UserWarning)
        yield
