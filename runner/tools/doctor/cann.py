"""Checks of CANN and ATB: which versions are installed, and whether their environment is loaded in this shell."""

from __future__ import annotations

import re
from dataclasses import dataclass

from packaging.version import Version

from runner.device import cann as places
from runner.device.backend import LIBRARY
from runner.device.soc import CHIPS, generation
from runner.tools.doctor import ascend
from runner.tools.doctor.finding import Finding, ok, problem, skipped, unknown, warning
from runner.tools.doctor.host import ARCHITECTURES
from runner.tools.doctor.machine import Machine
from runner.tools.doctor.versions import AS_OF, CANN, cann_for, release, torch_npu_for


@dataclass(frozen=True, slots=True)
class Cann:
    """An installed CANN toolkit; version None where its files do not say."""

    home: str
    version: str | None

    def script(self, machine: Machine) -> str:
        """The script that loads its environment."""
        return places.script(self.home, machine.root)


def find(machine: Machine) -> Cann | None:
    """The CANN that the environment names, or else the one in a usual place."""
    home = next(places.homes(machine.environment, machine.root), None)
    return None if home is None else Cann(home, version_of(machine, home, "toolkit"))


def version_of(machine: Machine, home: str, part: str) -> str | None:
    """The version of the toolkit or of the operators (ops), as the file says that its installer leaves."""
    for arch in (machine.arch, *ARCHITECTURES):
        text = machine.read(f"{home}/{arch}-linux/ascend_{part}_install.info") or ""
        if found := re.search(r"^version\s*=\s*(\S+)", text, re.MULTILINE | re.IGNORECASE):
            return found[1]
    if part != "toolkit":
        return None
    # Before 8.0 a file lists each part as [internal number:version].
    old = re.search(r"runtime_running_version=\[[^:\]]*:([^\]]+)\]", machine.read(f"{home}/version.cfg") or "")
    return old[1] if old else None


def toolkit(machine: Machine) -> Finding:
    """CANN's version."""
    found = find(machine)
    if found is None:
        where = " or ".join(places.parents(machine.environment))
        version, fit = _fitting(machine)
        installer = f"bash Ascend-cann-toolkit_{version}_linux-{machine.arch}.run --install"
        return problem(
            f"no CANN toolkit in {where}, and ASCEND_HOME_PATH names none{fit}",
            f"{installer} && {install_operators(machine, version)}",
        )
    if found.version is None:
        return unknown(f"{found.home}, version unknown: no ascend_toolkit_install.info or version.cfg")
    known = "" if torch_npu_for(found.version) else ", which the doctor's table does not have"
    return ok(f"CANN {found.version} in {found.home}{known}")


def install_operators(machine: Machine, version: str) -> str:
    """The command that installs the operators (ops) of this machine's chip."""
    chip = CHIPS.get(generation(ascend.soc(machine) or ""))
    return f"bash Ascend-cann-{chip.installer if chip else '<chip>'}-ops_{version}_linux-{machine.arch}.run --install"


def _fitting(machine: Machine) -> tuple[str, str]:
    """The CANN to install for the torch_npu that is there, and what the tables say of it."""
    npu = machine.version("torch-npu")
    if npu is None:
        return next(iter(CANN)), ""
    fits = cann_for(npu)
    if not fits:
        return "<version>", (
            f"; which one torch_npu {npu} was built for is not in the table of {AS_OF}; a pair that is: "
            f"CANN {next(iter(CANN))} and torch_npu {torch_npu_for(next(iter(CANN)))[0]}"
        )
    return fits[0], f"; torch_npu {npu} was built for CANN {' or '.join(fits)}"


def sourced(machine: Machine) -> Finding:
    """Whether set_env.sh was sourced: libraries cannot be found by a Python that already runs."""
    found = find(machine)
    if found is None:
        return skipped("no CANN to load")
    remedy = f"source {found.script(machine)}"
    home = machine.environment.get("ASCEND_HOME_PATH")
    if not home:
        return problem(f"ASCEND_HOME_PATH is not set: {found.script(machine)} was not sourced in this shell", remedy)
    if not machine.path(home).is_dir():
        return problem(f"ASCEND_HOME_PATH={home} is no folder", remedy)
    other = machine.environment.get("ASCEND_TOOLKIT_HOME", home)
    if machine.path(other).resolve() != machine.path(home).resolve():
        return warning(f"ASCEND_HOME_PATH={home}, but ASCEND_TOOLKIT_HOME={other}: two CANNs are mixed", remedy)
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
    parents = [f"{parent}/nnal/atb" for parent in places.parents(machine.environment)]
    folders = [folder for parent in parents for folder in machine.glob(f"{parent}/[0-9]*")]
    place = folders[0].rpartition("/")[0] if folders else parents[0]
    needed = machine.version("vllm-ascend") is not None
    home = machine.environment.get("ATB_HOME_PATH")
    if not folders and home is None:
        if needed:
            return problem(
                f"vllm-ascend is installed, and no ATB in {' or '.join(parents)}",
                f"bash Ascend-cann-nnal_<version>_linux-{machine.arch}.run --install && source {place}/set_env.sh",
            )
        return skipped("only vllm-ascend needs it")
    seen = f"ATB {folders[-1].rpartition('/')[2] if folders else '?'}"
    if home is None:
        answer = problem if needed else warning
        return answer(
            f"{seen}, but ATB_HOME_PATH is not set: its set_env.sh was not sourced", f"source {place}/set_env.sh"
        )
    torch = machine.version("torch")
    if home.rstrip("/").endswith("cxx_abi_0") and torch and Version(release(torch)) >= Version("2.7"):
        return problem(
            f"{seen} is loaded for the old C++ ABI (cxx_abi_0), torch {torch} has the new one: undefined symbols",
            f"source {place}/set_env.sh --cxx_abi=1",
        )
    return ok(f"{seen}, loaded from {home}")
