"""Checks of CANN, its operators and ATB: installed, loaded in this shell, Python packages."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from packaging.version import Version

from runner.device.ascend import CHIPS, generation, install_folders, set_env_script, toolkit_folders
from runner.device.process_setup import LIBRARY
from runner.tools.doctor import driver
from runner.tools.doctor.report import CheckResult, ok, problem, skip, unknown, warning
from runner.tools.doctor.system_info import ARCHITECTURES, SystemInfo
from runner.tools.doctor.versions import AS_OF, CANN, PACKAGES, cann_for, release, same_version, torch_npu_for

KERNELS = "opp/built-in/op_impl/ai_core/tbe/kernel"
COMPILER = "tbe"


@dataclass(frozen=True, slots=True)
class CannInstall:
    """An installed CANN toolkit; version None where its files do not say."""

    home: str
    version: str | None

    def set_env_script(self, machine: SystemInfo) -> str:
        """The script that loads its environment."""
        return set_env_script(self.home, machine.root)


def find_cann(machine: SystemInfo) -> CannInstall | None:
    """The CANN that the environment names, or else the one in a usual place."""
    home = next(toolkit_folders(machine.environment, machine.root), None)
    return None if home is None else CannInstall(home, version_of(machine, home, "toolkit"))


def version_of(machine: SystemInfo, home: str, part: str) -> str | None:
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


def toolkit(machine: SystemInfo) -> CheckResult:
    """CANN's version."""
    found = find_cann(machine)
    if found is None:
        where = " or ".join(install_folders(machine.environment))
        version, fit = _cann_for_torch_npu(machine)
        installer = f"bash Ascend-cann-toolkit_{version}_linux-{machine.arch}.run --install"
        return problem(
            f"no CANN toolkit in {where}, and ASCEND_HOME_PATH names none{fit}",
            f"{installer} && {install_operators(machine, version)}",
        )
    if found.version is None:
        return unknown(f"{found.home}, version unknown: no ascend_toolkit_install.info or version.cfg")
    known = "" if torch_npu_for(found.version) else ", which is not in the doctor's table"
    return ok(f"CANN {found.version} in {found.home}{known}")


def install_operators(machine: SystemInfo, version: str) -> str:
    """The command that installs the operators (ops) of this machine's chip."""
    chip = CHIPS.get(generation(driver.soc_of_first_card(machine) or ""))
    return f"bash Ascend-cann-{chip.installer if chip else '*'}-ops_{version}_linux-{machine.arch}.run --install"


def _cann_for_torch_npu(machine: SystemInfo) -> tuple[str, str]:
    """The CANN to install for the torch_npu that is there, and what the tables say of it."""
    npu = machine.version("torch-npu")
    if npu is None:
        return next(iter(CANN)), ""
    fits = cann_for(npu)
    if not fits:
        return "*", (
            f"; the table of {AS_OF} has no CANN for torch_npu {npu}; a listed pair is: CANN {next(iter(CANN))} and "
            f"torch_npu {torch_npu_for(next(iter(CANN)))[0]}"
        )
    return fits[0], f"; torch_npu {npu} was built for CANN {' or '.join(fits)}"


def cann_environment(machine: SystemInfo) -> CheckResult:
    """Whether set_env.sh was sourced: libraries cannot be found by a Python that already runs."""
    found = find_cann(machine)
    if found is None:
        version, _ = _cann_for_torch_npu(machine)
        new = version == "*" or Version(version) >= Version("9")
        parent = install_folders(machine.environment)[:2][0 if machine.may(machine.path("/usr/local"), os.W_OK) else -1]
        script = f"{parent}/{'cann' if new else 'ascend-toolkit'}/set_env.sh"
        return problem(f"{script} was not sourced in this shell", f"source {script}  # in every shell")
    remedy = f"source {found.set_env_script(machine)}"
    home = machine.environment.get("ASCEND_HOME_PATH")
    if not home:
        return problem(
            f"ASCEND_HOME_PATH is not set: {found.set_env_script(machine)} was not sourced in this shell", remedy
        )
    if not machine.path(home).is_dir():
        return problem(f"ASCEND_HOME_PATH={home} is not a folder", remedy)
    other = machine.environment.get("ASCEND_TOOLKIT_HOME", home)
    if machine.path(other).resolve() != machine.path(home).resolve():
        return warning(f"ASCEND_HOME_PATH={home}, but ASCEND_TOOLKIT_HOME={other}: two CANNs are mixed", remedy)
    folders = [folder for folder in machine.environment.get("LD_LIBRARY_PATH", "").split(":") if folder]
    holders = [folder for folder in folders if machine.exists(f"{folder}/{LIBRARY}")]
    if not holders:
        return problem(f"ASCEND_HOME_PATH={home}, but no folder of LD_LIBRARY_PATH has {LIBRARY}", remedy)
    if "ASCEND_OPP_PATH" not in machine.environment:
        return warning("ASCEND_OPP_PATH is not set: the operators are not found", remedy)
    if not machine.path(holders[0]).resolve().is_relative_to(machine.path(home).resolve()):
        return warning(f"ASCEND_HOME_PATH={home}, but {LIBRARY} comes from {holders[0]}: two CANNs are mixed", remedy)
    return ok(f"set_env.sh was sourced: ASCEND_HOME_PATH={home}")


def atb(machine: SystemInfo) -> CheckResult:
    """ATB, the transformer library of vllm-ascend: installed, loaded, and built for torch's C++ ABI."""
    usual = [f"{parent}/nnal/atb" for parent in install_folders(machine.environment)]
    folders = [folder for parent in usual for folder in machine.glob(f"{parent}/[0-9]*")]
    place = folders[0].rpartition("/")[0] if folders else usual[0]
    needed = machine.version("vllm-ascend") is not None or machine.sampler == "vllm"
    home = machine.environment.get("ATB_HOME_PATH")
    if not folders and home is None:
        if needed:
            cann = find_cann(machine)
            version = (cann and cann.version) or _cann_for_torch_npu(machine)[0]
            return problem(
                f"no ATB in {' or '.join(usual)}, but vllm-ascend needs it",
                f"bash Ascend-cann-nnal_{version}_linux-{machine.arch}.run --install && source {place}/set_env.sh",
            )
        return skip("only vllm-ascend needs it")
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


def operators(machine: SystemInfo) -> CheckResult:
    """The operators (ops) come in an installer of their own, one per chip, of the toolkit's version."""
    found = find_cann(machine)
    if found is None:
        return skip("no CANN")
    version = version_of(machine, found.home, "ops")
    chips = [path.rpartition("/")[2] for path in machine.glob(f"{found.home}/{KERNELS}/ascend*")]
    remedy = install_operators(machine, found.version or "*")
    if version is None and not chips:
        return problem(f"{found.home} has no operators: neither ascend_ops_install.info nor {KERNELS}/ascend…", remedy)
    if version and found.version and not same_version(version, found.version):
        return problem(f"operators {version} and toolkit {found.version}: versions must be equal", remedy)
    return _of_chip(machine, f"operators {version or 'of unknown version'}", chips, remedy)


def _of_chip(machine: SystemInfo, seen: str, chips: list[str], remedy: str) -> CheckResult:
    chip = driver.soc_of_first_card(machine)
    known = CHIPS.get(generation(chip or ""))
    if not chips or known is None:
        return unknown(f"{seen} for {', '.join(chips) or 'an unknown chip'}; this is {chip or 'unknown'}")
    if known.kernels not in chips:
        return problem(f"{seen} are for {', '.join(chips)}, but this is {chip} ({known.kernels})", remedy)
    return ok(f"{seen} for {known.kernels}")


def python_packages(machine: SystemInfo) -> CheckResult:
    """CANN's compiler of operators runs in Python: tbe must be found, and what it imports be installed."""
    found = find_cann(machine)
    if found is not None and not _finds_compiler(machine, found):
        return problem(
            f"{found.home}/python/site-packages is not on PYTHONPATH: Python does not find {COMPILER}, CANN's compiler",
            f"source {found.set_env_script(machine)}",
        )
    missing = {name: version for name, version in PACKAGES.items() if not _is_there(machine, name, version)}
    if missing:
        wanted = " ".join(f"'{name}>={version}'" if version != "0" else name for name, version in missing.items())
        return problem(f"CANN's operator compiler needs {', '.join(missing)}: not installed", f"pip install {wanted}")
    return ok(f"{f'{COMPILER} is on PYTHONPATH; ' if found else ''}{', '.join(PACKAGES)} are installed")


def _finds_compiler(machine: SystemInfo, found: CannInstall) -> bool:
    """Whether it is on PYTHONPATH, or does not lie where it usually does."""
    folders = [folder for folder in machine.environment.get("PYTHONPATH", "").split(":") if folder]
    own = f"{found.home}/python/site-packages/{COMPILER}"
    return not machine.exists(own) or any(machine.exists(f"{folder}/{COMPILER}") for folder in folders)


def _is_there(machine: SystemInfo, name: str, oldest: str) -> bool:
    version = machine.version(name)
    return version is not None and Version(version) >= Version(oldest)
