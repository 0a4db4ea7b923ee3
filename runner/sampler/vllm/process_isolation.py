"""An engine as a guest in a process that trains: what it changes there is put back.

vLLM sets seeds of the whole process, exchanges torch.set_num_threads, writes variables for its workers that ours would
inherit, runs kernels that torch refuses where it is to be deterministic, and its end destroys all process groups.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

# vllm-ascend (0.23) says where its operators lie, and how triton-ascend is to compile, as its parts are first used
KEPT_PREFIXES = ("VLLM_", "TRITON_", "ASCEND_CUSTOM_OPP_PATH")


@contextmanager
def allow_nondeterminism() -> Iterator[None]:
    """While an engine computes: any kernel will do, as its draws are recorded and not repeated."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("default")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


@contextmanager
def preserve_process_state() -> Iterator[None]:
    """Restore random states, threads and environment after vLLM is imported or an engine is built."""
    logging.getLogger("vllm").setLevel(logging.CRITICAL)  # until it reads VLLM_LOGGING_LEVEL
    environment, set_threads, threads = dict(os.environ), torch.set_num_threads, torch.get_num_threads()
    streams = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        with allow_nondeterminism(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what vLLM and what it brings say of one another
            yield
    finally:
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        random.setstate(streams[0])
        np.random.set_state(streams[1])
        torch.set_rng_state(streams[2])
        _restore(environment)


def _restore(environment: dict[str, str]) -> None:
    """Restore the environment, except variables that vLLM, its compiler and its operators still read."""
    for name in [name for name in os.environ if name not in environment and not name.startswith(KEPT_PREFIXES)]:
        del os.environ[name]
    os.environ.update({name: value for name, value in environment.items() if not name.startswith(KEPT_PREFIXES)})


@contextmanager
def redirect_tempdir(folder: Path) -> Iterator[None]:
    """Put temporary files of an engine that is built inside the block, and of its workers, in this folder."""
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    os.environ["TMPDIR"] = str(folder)  # which `preserve_process_state` puts back
    try:
        yield
    finally:
        tempfile.tempdir = before


def free_cached_memory() -> None:
    """Return cached memory of torch's allocator to the card before an engine wakes.

    vLLM's own memory runs out otherwise (0.23; newer versions free it).
    """
    if (card := torch.accelerator.current_accelerator(check_available=True)) is not None:
        gc.collect()
        torch.get_device_module(card).empty_cache()


@contextmanager
def keep_process_group(keep: bool) -> Iterator[None]:
    """While an engine is ended; keep: the process group that was there before it stays."""
    destroy: Any = dist.destroy_process_group

    def spare(group: Any = None) -> None:
        if group is not None and group is not dist.group.WORLD:
            destroy(group)

    if keep:
        dist.destroy_process_group = spare
    try:
        yield
    finally:
        dist.destroy_process_group = destroy
