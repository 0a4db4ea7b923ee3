"""Checks of HCCL's variables: its time-outs and their order, and how the cards of several machines meet."""

from __future__ import annotations

import ipaddress

from runner.device.presets import HCCL_DEFAULTS, hccl_objection
from runner.tools.doctor.finding import Finding, ok, problem, warning
from runner.tools.doctor.machine import Machine

MEETING = ("HCCL_SOCKET_IFNAME", "HCCL_IF_IP")


def timeouts(machine: Machine) -> Finding:
    """HCCL's time-outs: in range, and in the order CONNECT, EXEC < EVENT."""
    env = machine.environment
    seen = ", ".join(
        f"{name.removeprefix('HCCL_')}={env.get(name, f'{d} (default)')}" for name, d in HCCL_DEFAULTS.items()
    )
    if objection := hccl_objection(env):
        text, _, remedy = objection.rpartition("; ")
        return problem(text, remedy)
    if int(env.get("HCCL_EXEC_TIMEOUT", HCCL_DEFAULTS["HCCL_EXEC_TIMEOUT"])) == 0:
        return warning(
            f"{seen}: 0 = wait for ever is not honoured by every release, and a hang is then never noticed",
            "export HCCL_EXEC_TIMEOUT=7208 HCCL_EVENT_TIMEOUT=7300",
        )
    return ok(seen)


def network(machine: Machine) -> Finding:
    """How cards of several machines meet: by an interface that is there, an address that is one."""
    given = {name: machine.environment[name] for name in MEETING if name in machine.environment}
    there = [path.rpartition("/")[2] for path in machine.glob("/sys/class/net/*")]
    for name, value in given.items():
        remedy = f"unset {name}, or take what is this machine's: ip -brief address"
        if name == "HCCL_IF_IP" and not _is_address(value):
            return problem(f"{name}={value} is no address", remedy)
        if name == "HCCL_SOCKET_IFNAME" and there and not any(accepts(value, interface) for interface in there):
            return problem(f"{name}={value} fits no network interface here ({', '.join(there)})", remedy)
    return ok(", ".join(f"{name}={value}" for name, value in given.items()) or "left to HCCL")


def accepts(wanted: str, interface: str) -> bool:
    """Whether HCCL_SOCKET_IFNAME lets an interface in: `eth,enp` by beginnings, `=eth0` by name, `^…` all but these."""
    names = wanted.lstrip("^=").split(",")
    marks = wanted[: len(wanted) - len(wanted.lstrip("^="))]
    fits = any(interface == name if "=" in marks else interface.startswith(name) for name in names if name)
    return fits is not ("^" in marks)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
