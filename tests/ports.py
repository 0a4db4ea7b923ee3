"""Ports at which something is to listen later: chosen where the kernel takes none for a connection meanwhile."""

from __future__ import annotations

import random
import socket
from pathlib import Path

LOWEST = 20_000  # below, Ray takes ports for its workers
RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")  # of what connects, and of what listens at port 0
_given: set[int] = set()
_draw = random.SystemRandom()  # tests seed the other one


def free_port() -> int:
    """A port of the loopback device that nobody has, below the kernel's ephemeral ports; another one each time.

    Where nearly all ports are ephemeral, it is one of these.
    """
    begin = int(RANGE.read_text().split()[0])
    highest = begin - 1 if begin > LOWEST + 1000 else 65_535
    while True:
        port = _draw.randint(LOWEST, highest)
        if port in _given:
            continue
        with socket.socket() as tried:
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
        _given.add(port)
        return port
