"""Process groups of two, made by hand: gloo's, NCCL's and HCCL's, beside the one in which ranks train.

What NCCL and HCCL do about an error or a late collective (end the process) is turned off for these: whoever waits for
one has a deadline, and ends the group (`ended`).
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from runner.core import torch_compat

library: Any = distributed  # of which much that is used here has no types
FORM_S = 60.0  # for both to be there, and to know one another
STALL_S = 30.0  # for one piece of what is sent
NEVER = timedelta(days=365)  # the library's own deadline
SILENCED = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "HCCL_ASYNC_ERROR_HANDLING": "0"}  # read as a group is made
_making = threading.Lock()  # while it is held, the environment has these


@dataclass(frozen=True, slots=True)
class Collectives:
    """What a group is made of: torch's name of the backend, gloo, nccl or hccl, and the device of this process."""

    name: str
    device: torch.device


def hosted(listener: socket.socket) -> Any:
    """The store by which two find one another, behind a socket that listens, and is the store's from now on."""
    host, port = listener.getsockname()[:2]
    within = timedelta(seconds=FORM_S)
    options = {"world_size": 2, "timeout": within, "wait_for_workers": False}
    return torch_compat.serve_tcp_store(host, port, listener.detach(), **options)


def joined(host: str, port: int) -> Any:
    """That store, from the other side. Raises RuntimeError where it does not answer."""
    return library.TCPStore(host, port, 2, False, timedelta(seconds=FORM_S), False)


def group_of(collectives: Collectives, store: Any, rank: int, own: str) -> Any:
    """The group, as soon as both are there. own: the address of this machine towards the other, for gloo; NCCL and HCCL
    find theirs, or are told: NCCL_SOCKET_IFNAME, HCCL_SOCKET_IFNAME. Raises RuntimeError."""
    return _MAKERS[collectives.name](store, rank, own)


def ended(group: Any, works: list[Any]) -> None:
    """End a group, whatever is under way in it; may take as long as two pieces."""
    if hasattr(group, "abort_hccl_comm"):
        group.abort_hccl_comm("nobody waits for it any more")
    else:
        with suppress(RuntimeError):  # the simulated card's knows no end
            group.abort()
    end = time.monotonic() + 2 * STALL_S
    while not all(work.is_completed() for work in works) and time.monotonic() < end:
        time.sleep(0.05)  # nothing but time ends what gloo has begun, and to free it before would stop all threads


def _gloo(store: Any, rank: int, own: str) -> Any:
    kind = library.ProcessGroupGloo
    options = kind._Options()
    options._devices = [kind.create_device(hostname=own)]
    options._timeout = timedelta(seconds=STALL_S)
    return kind(store, rank, 2, options)


def _nccl(store: Any, rank: int, own: str) -> Any:
    kind = library.ProcessGroupNCCL
    options = kind.Options()
    options._timeout = NEVER
    options.config.blocking = 0  # or one that never forms could not be ended
    with silenced():
        return kind(store, rank, 2, options)


def _hccl(store: Any, rank: int, own: str) -> Any:
    """As torch_npu has registered it, or the simulated card."""
    plugin = library.Backend._plugins["HCCL"]
    if not plugin.extended_api:  # the simulated card's, over gloo
        return plugin.creator_fn(store, rank, 2, timedelta(seconds=STALL_S))
    asked = library.distributed_c10d._DistributedBackendOptions()
    asked.store, asked.group_rank, asked.group_size = store, rank, 2
    asked.timeout, asked.group_id, asked.global_ranks_in_group = NEVER, "weights", []
    with silenced():
        return plugin.creator_fn(asked, None)


_MAKERS: dict[str, Callable[[Any, int, str], Any]] = {"gloo": _gloo, "nccl": _nccl, "hccl": _hccl}


@contextmanager
def silenced() -> Iterator[None]:
    """Around the making of a group, which waits for nobody: an error in it does not end the process."""
    with _making:
        before = {name: os.environ.get(name) for name in SILENCED}
        os.environ.update(SILENCED)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
