"""Connects to a Ray cluster or starts a local one, in the processes that import Ray (Linux)."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import RayError

from runner.core.subprocess import JsonLines

NAMESPACE = "posttrain-run"
OBJECT_STORE_BYTES = 100 << 20  # it is not used; Ray's default is a third of the memory
TIMED_OUT = "timed out during startup"  # in the message of Ray's error, which is a plain Exception
BUSY = "is this machine overloaded?"
NOISE = "ray._private.accelerators.npu"  # logs a traceback at every start if NPUs are declared and CANN is missing


@contextmanager
def connect_cluster(asked: Mapping[str, Any], lines: JsonLines) -> Iterator[None]:
    """The requested cluster; sends `ready` with its nodes, or `refused` with the reason.

    asked: address (None: a local cluster, which only this machine can reach), and its resources and folder
    """
    logging.getLogger(NOISE).setLevel(logging.CRITICAL)
    try:
        _connect(asked)
        # Ray would exit at SIGTERM; after a signal to all processes (`ray job stop`) the job must still save.
        signal.signal(signal.SIGTERM, lambda *_: None)
        lines.send({"is": "ready", "nodes": nodes()})
        yield
    except (RayError, ConnectionError, RuntimeError, ValueError, OSError) as error:
        why = f"{type(error).__name__}: {error}"
        lines.send({"is": "refused", "why": why, "passes": isinstance(error, TimeoutError)})
        raise
    finally:
        ray.shutdown()


def nodes() -> list[Mapping[str, float]]:
    """The total resources of each living node."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _connect(asked: Mapping[str, Any]) -> None:
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "namespace": NAMESPACE}
    if asked["address"] is not None:
        ray.init(address=asked["address"], **quiet)
        return
    try:
        ray.init(
            address="local",
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _node_ip_address="127.0.0.1",
            _temp_dir=f"{asked['folder']}/ray",  # Ray makes it readable by everybody, but not its parent
            **asked["resources"],
            **quiet,
        )
    except Exception as error:
        if TIMED_OUT not in str(error):
            raise
        raise TimeoutError(f"Ray did not start within its own limit of 30 s: {BUSY}") from error
