"""Looks for a Ray cluster before Ray does, which would try for minutes; Ray itself is not imported."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from runner.core.errors import EnvironmentProblem

KNOCK_S = 10.0
ADDRESS = "RAY_ADDRESS"
FOLDERS = ("RAY_TMPDIR", "TMPDIR")  # the first that is set has Ray's files


def knock(address: str) -> None:
    """Raise EnvironmentProblem where nobody listens.

    address: HOST:PORT or auto; what it does not say, and where no cluster of this machine is on record, is left to Ray
    """
    named, what = address, f"Ray at {address}"
    if address == "auto":
        named, source = _on_record()
        what = f"Ray at auto ({named}, says {source})"
    host, _, port = named.rpartition(":")
    if not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), KNOCK_S).close()
    except OSError as error:
        advice = "`ray start --head` says the address of a cluster; without launch.address the job has one of its own"
        raise EnvironmentProblem(f"{what}: nobody listens there ({error}); {advice}") from error


def _on_record() -> tuple[str, str]:
    """What Ray takes `auto` for, empty where it looks around; and who says so."""
    if named := os.environ.get(ADDRESS):
        return named, ADDRESS
    folder = next((os.environ[name] for name in FOLDERS if name in os.environ), "/tmp")
    file = Path(folder) / "ray" / "ray_current_cluster"  # of the last `ray start`; one that was killed leaves it
    try:
        return file.read_text(encoding="utf-8").strip(), str(file)
    except FileNotFoundError:
        return "", ""
