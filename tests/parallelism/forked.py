"""Real ranks for a test: forked processes with a gloo group between them, so that torch is imported once."""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch import distributed

TIMEOUT_S = 200.0


def ranks(size: int, work: Callable[..., Any], *arguments: Any, join: bool = True) -> list[Any]:
    """What `work(rank, *arguments)` returns on each of `size` ranks. An error on one of them fails the test.

    join: with a process group between them; else `work` makes its own
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder) / "meeting" if join else None
        pipes = [context.Pipe(duplex=False) for _ in range(size)]
        processes = [
            context.Process(target=_rank, args=(rank, size, meeting, pipes[rank][1], work, arguments))
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        for _, sender in pipes:
            sender.close()
        try:
            return _received([receiver for receiver, _ in pipes])
        finally:
            for process in processes:
                process.kill()
                process.join()


def _received(receivers: list[Connection]) -> list[Any]:
    """What every rank sent; the first one that fails is who is at fault, as the others wait for it."""
    found: dict[int, Any] = {}
    while len(found) < len(receivers):
        ready = wait([one for rank, one in enumerate(receivers) if rank not in found], TIMEOUT_S)
        if not ready:
            raise AssertionError(f"only ranks {sorted(found)} have answered within {TIMEOUT_S:.0f} s")
        for rank, receiver in enumerate(receivers):
            if receiver in ready:
                found[rank] = _answer(rank, receiver)
    return [found[rank] for rank in range(len(receivers))]


def _answer(rank: int, receiver: Connection) -> Any:
    try:
        right, found = pickle.loads(receiver.recv_bytes())
    except EOFError:
        raise AssertionError(f"rank {rank} died without an answer") from None
    assert right, f"rank {rank}:\n{found}"
    return found


def _rank(
    rank: int, size: int, meeting: Path | None, sender: Connection, work: Callable[..., Any], arguments: Any
) -> None:
    torch.set_num_threads(1)
    try:
        if meeting is not None:
            store, timeout = distributed.FileStore(str(meeting), size), timedelta(seconds=TIMEOUT_S)
            distributed.init_process_group("cpu:gloo", store=store, rank=rank, world_size=size, timeout=timeout)
        found = (True, work(rank, *arguments))
    except BaseException:
        found = (False, traceback.format_exc())
    sender.send_bytes(pickle.dumps(found))  # send() would leave tensors in shared memory, which ends with the process
    sender.close()
    if distributed.is_initialized():
        with suppress(RuntimeError):  # of a rank that failed
            distributed.barrier()  # others may still make a group that this rank has, and would find it closed
