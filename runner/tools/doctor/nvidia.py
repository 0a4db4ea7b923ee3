"""Checks of NVIDIA GPUs: device files, driver, nvidia-smi, and the CUDA that torch was built for."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from runner.core.device_kinds import CUDA
from runner.device import device_stats
from runner.tools.doctor.report import CheckResult, ok, problem, skip, unknown, wait_or_choose, warning
from runner.tools.doctor.system_info import SystemInfo
from runner.tools.doctor.versions import release
from runner.tracker.text import count_noun

FOREIGN_SHARE = 0.1
NODES = str(CUDA.nodes)
INSTALL_DRIVER = "sudo ubuntu-drivers install && sudo reboot  # on Ubuntu; elsewhere NVIDIA's own installer"


def is_present(machine: SystemInfo) -> bool:
    """Whether there is a GPU of NVIDIA or its driver."""
    return bool(machine.glob(NODES)) or machine.exists("/proc/driver/nvidia/version") or count(machine) > 0


def count(machine: SystemInfo) -> int:
    """How many GPUs nvidia-smi lists."""
    return len(_gpus(machine))


def device_nodes(machine: SystemInfo) -> CheckResult:
    """/dev/nvidia0 and so on."""
    nodes = machine.glob(NODES)
    if locked := [path for path in nodes if not machine.may(machine.path(path), os.R_OK | os.W_OK)]:
        return problem(f"no permission for {', '.join(locked)}", "sudo usermod -aG video $USER, and log in again")
    if nodes:
        return ok(f"{len(nodes)}: {nodes[0]}" + (f" … {nodes[-1]}" if len(nodes) > 1 else ""))
    return problem("no /dev/nvidia0: no GPU, or no driver", _driver_steps(machine))


def _driver_steps(machine: SystemInfo) -> str:
    """The command that brings the driver here: into this container, or onto this machine."""
    return machine.docker_run("--gpus all") if machine.in_container else INSTALL_DRIVER


def driver(machine: SystemInfo) -> CheckResult:
    """The driver's version, and the newest CUDA it can run against the one torch was built for."""
    banner = machine.command_result("nvidia-smi").out
    version, newest = (
        re.search(pattern, banner) for pattern in (r"Driver Version:\s*([\d.]+)", r"CUDA Version:\s*([\d.]+)")
    )
    seen = f"driver {version[1]}, supports CUDA {newest[1]}" if version and newest else ""
    torch = machine.version("torch")
    built = re.search(r"^cuda.*=\s*'([\d.]+)'", machine.read_package_file("torch/version.py") or "", re.MULTILINE)
    if torch is not None and built is None:
        install = f"pip install --force-reinstall torch=={release(torch)} --index-url https://pypi.org/simple"
        return problem("; ".join(filter(None, [seen, f"torch {torch} is a CPU build"])), install)
    if version is None or newest is None:
        return unknown("nvidia-smi prints no versions of driver and CUDA")
    if torch is None or built is None:
        return ok(seen)
    # Within one major version a newer toolkit runs on an older driver.
    if int(built[1].split(".")[0]) > int(newest[1].split(".")[0]):
        return problem(f"{seen}; torch {torch} is built for CUDA {built[1]}", INSTALL_DRIVER)
    return ok(f"{seen}; torch {torch} is built for CUDA {built[1]}")


def products(machine: SystemInfo) -> CheckResult:
    """The GPUs that nvidia-smi lists."""
    answer = machine.command_result(*device_stats.QUERY)
    if answer.code != 0:
        return problem(f"nvidia-smi does not respond: {answer.last_line}", _driver_steps(machine))
    found = _gpus(machine)
    if not found:
        return problem("nvidia-smi lists no GPU", "nvidia-smi -L")
    return ok(", ".join(f"{gpu.name} ({gpu.memory_total_mb} MB)" for gpu in found))


def memory_in_use(machine: SystemInfo) -> CheckResult:
    """Whether somebody else is on the GPUs."""
    found = _gpus(machine)
    if not found:
        return skip("nvidia-smi lists no GPU")
    crowded = [gpu for gpu in found if gpu.memory_used_mb > FOREIGN_SHARE * gpu.memory_total_mb]
    full = [f"{gpu.index}: {gpu.memory_used_mb} of {gpu.memory_total_mb} MB" for gpu in crowded]
    if full:
        free = [str(gpu.index) for gpu in found if gpu not in crowded]
        used = "; ".join([f"in use: {', '.join(full)}", *_processes(machine)])
        return warning(used, wait_or_choose("CUDA_VISIBLE_DEVICES", free))
    return ok(f"{len(found)} free")


def topology(machine: SystemInfo) -> CheckResult:
    """How the GPUs reach one another."""
    if count(machine) < 2:
        return skip("fewer than two GPUs")
    kinds = device_stats.links(machine.command_result("nvidia-smi", "topo", "-m").out)
    seen = ", ".join(f"{count_noun(number, 'pair')} {kind}" for kind, number in kinds.items())
    return ok(seen) if kinds else unknown("no matrix of GPUs in what nvidia-smi topo -m printed")


def _gpus(machine: SystemInfo) -> list[device_stats.Gpu]:
    return device_stats.parse_query(machine.command_result(*device_stats.QUERY).out)


def _processes(machine: SystemInfo) -> Iterator[str]:
    lines = machine.command_result(
        "nvidia-smi", "--query-compute-apps=pid,name,used_memory", "--format=csv,noheader"
    ).out
    if lines.strip():
        yield "processes: " + "; ".join(line.strip() for line in lines.splitlines())
