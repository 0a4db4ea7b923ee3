"""Checks of CANN and ATB: which versions are installed, and whether their environment is loaded in this shell."""

from __future__ import annotations

import re
from dataclasses import dataclass

from packaging.version import Version

from runner.doctor.finding import Finding, ok, problem, skipped, unknown, warning
from runner.doctor.machine import Machine
from runner.doctor.versions import AS_OF, cann_for, release, torch_npu_for

HOMES = (
    "/usr/local/Ascend/ascend-toolkit/latest",
    "/usr/local/Ascend/cann",
    "/usr/local/Ascend/cann-*",
    "/usr/local/Ascend/ascend-toolkit/[0-9]*",
)
ATB = "/usr/local/Ascend/nnal/atb"
LIBRARY = "libhccl.so"  # CANN's library for sums over cards: without it torch_npu cannot be imported


@dataclass(frozen=True, slots=True)
class Cann:
    """An installed CANN toolkit; version None where its files do not say."""

    home: str
    version: str | None

    def script(self, machine: Machine) -> str:
        """The script that loads its environment."""
        parent = self.home.rpartition("/")[0]
        found = [f"{place}/set_env.sh" for place in (self.home, parent) if machine.exists(f"{place}/set_env.sh")]
        return found[0] if found else f"{self.home}/set_env.sh"


def find(machine: Machine) -> Cann | None:
    """The CANN that the environment names, or else the one in a usual place."""
    named = [machine.environment.get(name, "") for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")]
    usual = [home for pattern in HOMES for home in machine.glob(pattern)]
    for home in [*filter(None, named), *usual]:
        if machine.path(home).is_dir():
            return Cann(home.rstrip("/"), _version(machine, home.rstrip("/")))
    return None


def _version(machine: Machine, home: str) -> str | None:
    for arch in (machine.arch, "aarch64", "x86_64"):
        text = machine.read(f"{home}/{arch}-linux/ascend_toolkit_install.info") or ""
        if found := re.search(r"^version\s*=\s*(\S+)", text, re.MULTILINE | re.IGNORECASE):
            return found[1]
    # Before 8.0 a file lists each part as [internal number:version].
    old = re.search(r"runtime_running_version=\[[^:\]]*:([^\]]+)\]", machine.read(f"{home}/version.cfg") or "")
    return old[1] if old else None


def toolkit(machine: Machine) -> Finding:
    """CANN's version."""
    found = find(machine)
    if found is None:
        version, fit = _fitting(machine)
        return problem(
            f"no CANN toolkit in /usr/local/Ascend, and ASCEND_HOME_PATH names none{fit}",
            f"bash Ascend-cann-toolkit_{version}_linux-{machine.arch}.run --install, then the kernels of your product",
        )
    if found.version is None:
        return unknown(f"{found.home}, version unknown: no ascend_toolkit_install.info or version.cfg")
    known = "" if torch_npu_for(found.version) else ", which the doctor's table does not have"
    return ok(f"CANN {found.version} in {found.home}{known}")


def _fitting(machine: Machine) -> tuple[str, str]:
    """The CANN to install for the torch_npu that is there, and what the tables say of it."""
    npu = machine.version("torch-npu")
    if npu is None:
        return "<version>", ""
    fits = cann_for(npu)
    if not fits:
        return "<version>", f"; which one torch_npu {npu} was built for is not in the table of {AS_OF}"
    return fits[0], f"; torch_npu {npu} was built for CANN {' or '.join(fits)}"


def sourced(machine: Machine) -> Finding:
    """Whether set_env.sh was sourced: libraries cannot be found by a Python that already runs."""
    found = find(machine)
    if found is None:
        return skipped("no CANN to load")
    remedy = f"source {found.script(machine)}"
    home = machine.environment.get("ASCEND_HOME_PATH")
    if home is None:
        return problem(f"ASCEND_HOME_PATH is not set: {found.script(machine)} was not sourced in this shell", remedy)
    if not machine.path(home).is_dir():
        return problem(f"ASCEND_HOME_PATH={home} is no folder", remedy)
    folders = [folder for folder in machine.environment.get("LD_LIBRARY_PATH", "").split(":") if folder]
    holders = [folder for folder in folders if machine.exists(f"{folder}/{LIBRARY}")]
    if not holders:
        return problem(f"ASCEND_HOME_PATH={home}, but no folder of LD_LIBRARY_PATH holds {LIBRARY}", remedy)
    if "ASCEND_OPP_PATH" not in machine.environment:
        return warning("ASCEND_OPP_PATH is not set: the operators are not found", remedy)
    if not machine.path(holders[0]).resolve().is_relative_to(machine.path(home).resolve()):
        return warning(f"ASCEND_HOME_PATH={home}, but {LIBRARY} comes from {holders[0]}: two CANNs are mixed", remedy)
    return ok(f"set_env.sh was sourced: ASCEND_HOME_PATH={home}")


def atb(machine: Machine) -> Finding:
    """ATB, the transformer library that vllm-ascend needs: installed, loaded, and built for torch's C++ ABI."""
    folders = machine.glob(f"{ATB}/[0-9]*")
    needed = machine.version("vllm-ascend") is not None
    home = machine.environment.get("ATB_HOME_PATH")
    if not folders and home is None:
        if needed:
            return problem(
                f"vllm-ascend is installed, and no ATB in {ATB}",
                f"bash Ascend-cann-nnal_<version>_linux-<arch>.run --install && source {ATB}/set_env.sh",
            )
        return skipped("only vllm-ascend needs it")
    seen = f"ATB {folders[-1].rpartition('/')[2] if folders else '?'}"
    if home is None:
        answer = problem if needed else warning
        return answer(
            f"{seen}, but ATB_HOME_PATH is not set: its set_env.sh was not sourced", f"source {ATB}/set_env.sh"
        )
    torch = machine.version("torch")
    if home.rstrip("/").endswith("cxx_abi_0") and torch and Version(release(torch)) >= Version("2.7"):
        return problem(
            f"{seen} is loaded for the old C++ ABI (cxx_abi_0), torch {torch} has the new one: undefined symbols",
            f"source {ATB}/set_env.sh --cxx_abi=1",
        )
    return ok(f"{seen}, loaded from {home}")
