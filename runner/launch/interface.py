"""Where the other machines of a job find this one: gloo takes the address of the host's own name, unless it is
told an interface, and on many machines that is a loopback one."""

from __future__ import annotations

import socket

import psutil


def interface_of(address: str) -> str | None:
    """The name of the interface with this IPv4 address, None where there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.family == socket.AF_INET and one.address == address for one in addresses):
            return name
    return None


def address_towards(host: str) -> str:
    """This machine's IPv4 address on the way to `host`; empty where there is no way. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            asked.connect((host, 9))
        except OSError:
            return ""
        return str(asked.getsockname()[0])


def met_at(address: str) -> dict[str, str]:
    """The environment in which gloo is found at this machine's address; empty where no interface has it."""
    name = interface_of(address)
    return {} if name is None else {"GLOO_SOCKET_IFNAME": name}
