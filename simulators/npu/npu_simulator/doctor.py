"""Checks of the simulated NPU: what it is built with, whether it is built, and what may not stand beside it."""

from __future__ import annotations

import re

from npu_simulator.prepare import COMMAND, CPU_BUILD, CUDA_BUILD, TOOLS, is_cuda_build, parts
from npu_simulator.process import OPERATORS
from runner.tools.doctor.report import CheckResult, ok, problem, skip, warning
from runner.tools.doctor.run_checks import NPU_VARIABLES, Check
from runner.tools.doctor.system_info import SystemInfo

OLDEST_GCC = 11


def compiler(machine: SystemInfo) -> CheckResult:
    """It is built once, with g++ and binutils."""
    if is_built(machine):
        return skip("built already")
    if missing := [tool for tool in TOOLS if machine.command_result(tool, "--version").code != 0]:
        return problem(f"no {', '.join(missing)}", f"install g++ {OLDEST_GCC} or newer, and binutils; then: {COMMAND}")
    said = machine.command_result("g++", "-dumpfullversion").out.strip()
    version = re.match(r"\d+", said)
    if version and int(version[0]) < OLDEST_GCC:
        return problem(f"g++ {said}: C++20 needs {OLDEST_GCC}", f"install g++ {OLDEST_GCC} or newer; then: {COMMAND}")
    return ok(f"g++ {said}, binutils")


def parts_made(machine: SystemInfo) -> CheckResult:
    """The wheel of torch_npu and the libraries, in the cache."""
    torch = machine.version("torch")
    if torch is None:
        return skip("torch is not installed")
    if is_cuda_build():
        return problem(CUDA_BUILD, CPU_BUILD)
    if not is_built(machine):
        return warning(f"not built for torch {torch} yet: 45 MB are fetched with pip, and g++ takes a minute", COMMAND)
    return ok(f"built for torch {torch}: {parts().built}")


def no_cann(machine: SystemInfo) -> CheckResult:
    """The real operators of CANN would be found beside the simulated runtime, and end the process."""
    folders = machine.environment.get("LD_LIBRARY_PATH", "").split(":")
    if found := next((folder for folder in folders if folder and machine.exists(f"{folder}/{OPERATORS}")), None):
        return problem(f"CANN is loaded in this shell ({found}/{OPERATORS})", "a new shell, without its set_env.sh")
    return ok("none is loaded in this shell")


def is_built(machine: SystemInfo) -> bool:
    """Whether its parts for the installed torch are there."""
    return machine.version("torch") is not None and parts().whole


CHECKS: tuple[Check, ...] = (
    ("compiler", compiler),
    ("simulator", parts_made),
    ("CANN", no_cann),
    *NPU_VARIABLES,
)
