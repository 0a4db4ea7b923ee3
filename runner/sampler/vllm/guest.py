"""An engine as a guest in a process that trains: what it changes there is put back.

vLLM sets seeds of the whole process, exchanges torch.set_num_threads, writes variables for its workers that ours would
inherit, runs kernels that torch refuses where it is to be deterministic, and its end destroys all process groups.
"""

from __future__ import annotations

import logging
import os
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


@contextmanager
def at_work() -> Iterator[None]:
    """While an engine computes: any kernel will do, as its draws are recorded and not repeated."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("default")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


@contextmanager
def moving_in() -> Iterator[None]:
    """While vLLM is imported or an engine built: random states, threads and environment are afterwards as before."""
    logging.getLogger("vllm").setLevel(logging.CRITICAL)  # until it reads VLLM_LOGGING_LEVEL
    environment, set_threads, threads = dict(os.environ), torch.set_num_threads, torch.get_num_threads()
    streams = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        with at_work(), warnings.catch_warnings():
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
    """All but vLLM's own variables, which it goes on reading."""
    for name in os.environ.keys() - environment.keys():
        if not name.startswith("VLLM_"):
            del os.environ[name]
    os.environ.update(environment)


@contextmanager
def moving_out(keep: bool) -> Iterator[None]:
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
