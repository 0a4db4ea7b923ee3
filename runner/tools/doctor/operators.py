"""Checks of CANN's operators: those of the chip are there, and so are the Python packages that their compiler needs."""

from __future__ import annotations

from packaging.version import Version

from runner.device.soc import CHIPS, generation
from runner.tools.doctor import ascend
from runner.tools.doctor.cann import Cann, find, install_operators, version_of
from runner.tools.doctor.finding import Finding, ok, problem, skipped, unknown
from runner.tools.doctor.machine import Machine
from runner.tools.doctor.versions import PACKAGES, same

KERNELS = "opp/built-in/op_impl/ai_core/tbe/kernel"
COMPILER = "tbe"


def operators(machine: Machine) -> Finding:
    """The operators (ops) come in an installer of their own, one per chip, of the toolkit's version."""
    found = find(machine)
    if found is None:
        return skipped("no CANN")
    version = version_of(machine, found.home, "ops")
    chips = [path.rpartition("/")[2] for path in machine.glob(f"{found.home}/{KERNELS}/ascend*")]
    remedy = install_operators(machine, found.version or "<version>")
    if version is None and not chips:
        return problem(f"{found.home} has no operators: neither ascend_ops_install.info nor {KERNELS}/ascend…", remedy)
    if version and found.version and not same(version, found.version):
        return problem(f"operators {version} beside toolkit {found.version}: both must be one version", remedy)
    return _of_chip(machine, f"operators {version or 'of an unnamed version'}", chips, remedy)


def _of_chip(machine: Machine, seen: str, chips: list[str], remedy: str) -> Finding:
    chip = ascend.soc(machine)
    known = CHIPS.get(generation(chip or ""))
    if not chips or known is None:
        return unknown(f"{seen} for {', '.join(chips) or 'a chip that they do not name'}; this is {chip or 'unknown'}")
    if known.kernels not in chips:
        return problem(f"{seen} are for {', '.join(chips)}, and this is {chip} ({known.kernels})", remedy)
    return ok(f"{seen} for {known.kernels}")


def python_packages(machine: Machine) -> Finding:
    """CANN's compiler of operators runs in Python: tbe must be found, and what it imports be installed."""
    found = find(machine)
    if found is None:
        return skipped("no CANN")
    if not _finds_compiler(machine, found):
        return problem(
            f"{found.home}/python/site-packages is not on PYTHONPATH: Python does not find {COMPILER}, CANN's compiler",
            f"source {found.script(machine)}",
        )
    missing = {name: version for name, version in PACKAGES.items() if not _is_there(machine, name, version)}
    if missing:
        wanted = " ".join(f"'{name}>={version}'" if version != "0" else name for name, version in missing.items())
        return problem(f"CANN's compiler of operators imports {', '.join(missing)}: not here", f"pip install {wanted}")
    return ok(f"{COMPILER} is on PYTHONPATH; {', '.join(PACKAGES)} are there")


def _finds_compiler(machine: Machine, found: Cann) -> bool:
    """Whether it is on PYTHONPATH, or does not lie where it usually does."""
    folders = [folder for folder in machine.environment.get("PYTHONPATH", "").split(":") if folder]
    own = f"{found.home}/python/site-packages/{COMPILER}"
    return not machine.exists(own) or any(machine.exists(f"{folder}/{COMPILER}") for folder in folders)


def _is_there(machine: Machine, name: str, oldest: str) -> bool:
    version = machine.version(name)
    return version is not None and Version(version) >= Version(oldest)
