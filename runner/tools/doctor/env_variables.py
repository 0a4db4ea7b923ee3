"""Checks of environment variables: mistakes that a driver, HCCL or an allocator ignores or dies of."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence

from packaging.version import Version

from runner.core.device_kinds import NPU, Kind, parse_visible, unread_variable_problem
from runner.core.package import read_table
from runner.device.process_setup import HCCL_DEFAULTS, QUEUES, hccl_objection
from runner.tools.doctor.report import CheckResult, ok, problem, skip, warning
from runner.tools.doctor.system_info import SystemInfo
from runner.tools.doctor.versions import release

SHARED_ALLOCATOR = "PYTORCH_ALLOC_CONF"
MEETING = ("HCCL_SOCKET_IFNAME", "HCCL_IF_IP")  # how the cards of several machines meet
# What may not stand beside growing segments on an NPU.
EXCLUDES = ("max_split_size_mb", "garbage_collection_threshold")

_TABLE = read_table(__file__, "variables.yaml")
CHOICES: dict[str, Sequence[str]] = {"TASK_QUEUE_ENABLE": QUEUES, **_TABLE["choices"]}
NUMBERS: list[str] = _TABLE["numbers"]
REMARKS: dict[str, dict[str, str]] = _TABLE["remarks"]


def allocator(machine: SystemInfo, kind: Kind) -> CheckResult:
    """A kind of device's allocator: one variable, and no settings that exclude one another."""
    own = str(kind.allocator)
    given = {name: machine.environment[name] for name in (own, SHARED_ALLOCATOR) if name in machine.environment}
    seen = ", ".join(f"{name}={value}" for name, value in given.items()) or "none set"
    if len(given) == 2:
        fatal = kind is NPU and Version(release(machine.version("torch") or "2.10")) >= Version("2.10")
        how = "torch_npu exits" if fatal else "only one of them is read"
        answer = problem if fatal else warning
        return answer(f"{own} and {SHARED_ALLOCATOR} are both set; {how}", f"unset {own}")
    for name, text in given.items():
        settings = [piece.partition(":") for piece in text.split(",")]
        if malformed := [key for key, colon, value in settings if not (colon and value)]:
            return problem(f"{name}: '{malformed[0]}' is not key:value", f"export {name}=expandable_segments:True")
        keys = [key.strip() for key, _, _ in settings]
        if repeated := {key for key in keys if keys.count(key) > 1}:
            last = dict(zip(keys, text.split(","), strict=True)).values()
            return problem(f"{name}: {', '.join(sorted(repeated))} is listed twice", f"export {name}={','.join(last)}")
        grows = any(key.strip() == "expandable_segments" and value == "True" for key, _, value in settings)
        left = [piece for key, piece in zip(keys, text.split(","), strict=True) if key not in EXCLUDES]
        if kind is NPU and grows and (beside := [key for key in keys if key in EXCLUDES]):
            return problem(
                f"{name}: expandable_segments excludes {', '.join(beside)}", f"export {name}={','.join(left)}"
            )
    return ok(seen)


def choices(machine: SystemInfo) -> CheckResult:
    """Variables that take one of a few values: another value is mostly taken for the default, silently."""
    given = {name: machine.environment[name] for name in CHOICES if name in machine.environment}
    odd = {name: machine.environment[name] for name in NUMBERS if not machine.environment.get(name, "0").isdecimal()}
    if odd:
        texts = [f"{name}={value} is not an integer" for name, value in odd.items()]
        return problem("; ".join(texts), f"unset {' '.join(odd)}")
    wrong = {name: value for name, value in given.items() if value not in CHOICES[name]}
    if wrong:
        texts = [f"{name}={value} (known: {', '.join(CHOICES[name])})" for name, value in wrong.items()]
        answer = problem if "TASK_QUEUE_ENABLE" in wrong else warning  # torch_npu ends the process over that one
        return answer("; ".join(texts), f"unset {' '.join(wrong)}")
    old = machine.environment.get("HCCL_ASYNC_ERROR_HANDLING")
    if old is not None and old != machine.environment.get("TORCH_HCCL_ASYNC_ERROR_HANDLING", old):
        return warning(
            "HCCL_ASYNC_ERROR_HANDLING, the older name, differs from TORCH_HCCL_ASYNC_ERROR_HANDLING",
            "unset HCCL_ASYNC_ERROR_HANDLING",
        )
    remarks = {
        f"{name}={value}: {REMARKS[name][value]}": name
        for name, value in given.items()
        if value in REMARKS.get(name, {})
    }
    if remarks:
        return warning("; ".join(remarks), f"unset {' '.join(remarks.values())}")
    return ok(", ".join(f"{name}={value}" for name, value in given.items()) or "none set")


def visible(machine: SystemInfo, kind: Kind, count: Callable[[SystemInfo], int]) -> CheckResult:
    """Compare the list of visible devices with the present ones.

    CANN silently drops a number that does not exist, CUDA everything after a wrong entry.
    """
    variable, there = str(kind.visible), count(machine)
    text = machine.environment.get(variable)
    if fault := unread_variable_problem(kind, machine.environment):
        return problem(*fault)
    if text is None:
        return ok(f"{variable} is not set: all {there}" if there else f"{variable} is not set")
    asked = parse_visible(text, kind.names)
    if asked.faults:
        return problem(f"{variable}={text}: {'; '.join(asked.faults)}", f"export {variable}=0")
    if not asked.ids:
        return problem(f"{variable} is set but empty: no device is visible", f"unset {variable}")
    if not there:
        return skip(f"{variable}={text}, but no device was found")
    if beyond := asked.out_of_range(there):
        rest = [str(number) for number in asked.ids if number not in beyond]
        return problem(
            f"{variable}={text}: the devices here are 0 to {there - 1}, so {', '.join(map(str, beyond))} "
            f"{'is' if len(beyond) == 1 else 'are'} silently ignored",
            f"export {variable}={','.join(rest) or '0'}",
        )
    return ok(f"{variable}={text}: {len(asked.ids)} of {there}")


def timeouts(machine: SystemInfo) -> CheckResult:
    """HCCL's timeouts: in range, and in the order CONNECT, EXEC < EVENT."""
    env = machine.environment
    seen = ", ".join(
        f"{name.removeprefix('HCCL_')}={env.get(name, f'{d} (default)')}" for name, d in HCCL_DEFAULTS.items()
    )
    if objection := hccl_objection(env):
        text, _, remedy = objection.rpartition("; ")
        return problem(text, remedy)
    if int(env.get("HCCL_EXEC_TIMEOUT", HCCL_DEFAULTS["HCCL_EXEC_TIMEOUT"])) == 0:
        return warning(
            f"{seen}: some releases do not support 0 (wait forever), and a hang is then never detected",
            "export HCCL_EXEC_TIMEOUT=7208 HCCL_EVENT_TIMEOUT=7300",
        )
    return ok(seen)


def network(machine: SystemInfo) -> CheckResult:
    """How cards of several machines meet: by an interface that is there, an address that is one."""
    given = {name: machine.environment[name] for name in MEETING if name in machine.environment}
    there = [path.rpartition("/")[2] for path in machine.glob("/sys/class/net/*")]
    for name, value in given.items():
        remedy = f"unset {name}, or use an interface of this machine: ip -brief address"
        if name == "HCCL_IF_IP" and not _is_address(value):
            return problem(f"{name}={value} is not an address", remedy)
        if name == "HCCL_SOCKET_IFNAME" and there and not any(accepts(value, interface) for interface in there):
            return problem(f"{name}={value} matches no network interface here ({', '.join(there)})", remedy)
    return ok(", ".join(f"{name}={value}" for name, value in given.items()) or "chosen by HCCL")


def accepts(wanted: str, interface: str) -> bool:
    """Whether HCCL_SOCKET_IFNAME accepts an interface: `eth,enp` by prefix, `=eth0` by name, `^…` others."""
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
