"""Checks of an NPU's driver: device files and permissions, versions, containers, logs."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence

from runner.tools.doctor.check_result import CheckResult, ok, problem, skip
from runner.tools.doctor.system_info import SystemInfo
from runner.tracker.text import count_noun

DRIVER = "/usr/local/Ascend/driver/version.info"
FIRMWARE = "/usr/local/Ascend/firmware/version.info"
INSTALLED = "/etc/ascend_install.info"  # where the driver was put, and the group that may use its devices
GROUP = "HwHiAiUser"
MANAGERS = ("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc")
# What a container needs of its host: path → how it is handed in.
MOUNTS = {
    **{path: f"--device {path}" for path in MANAGERS},
    "/usr/local/Ascend/driver/version.info": "-v /usr/local/Ascend/driver:/usr/local/Ascend/driver",
    "/usr/local/bin/npu-smi": "-v /usr/local/bin/npu-smi:/usr/local/bin/npu-smi",
    "/usr/local/dcmi": "-v /usr/local/dcmi:/usr/local/dcmi",
    "/etc/ascend_install.info": "-v /etc/ascend_install.info:/etc/ascend_install.info",
}
# Driver before firmware; the product and the version stand in the names of the files from hiascend.com.
DRIVER_RUN, FIRMWARE_RUN = "bash Ascend-hdk-*-npu-driver_*.run --full", "bash Ascend-hdk-*-npu-firmware_*.run --full"
INSTALL_DRIVER = f"{DRIVER_RUN} && {FIRMWARE_RUN} && reboot"


def is_present(machine: SystemInfo) -> bool:
    """Whether anything of an NPU is on this machine, its software included."""
    return bool(
        machine.nodes
        or any(map(machine.exists, (DRIVER, "/usr/local/Ascend", "/usr/local/bin/npu-smi")))
        or any(machine.version(name) for name in ("torch-npu", "vllm-ascend"))
        or "ASCEND_HOME_PATH" in machine.environment
    )


def install_command(machine: SystemInfo) -> str:
    """The command that brings driver and devices here: into this container, or onto this machine."""
    if not machine.in_container:
        return INSTALL_DRIVER
    flags = [] if machine.nodes else ["--device /dev/davinci0"]
    flags += [flag for path, flag in MOUNTS.items() if not machine.exists(path)]
    return f"docker run {' '.join(flags)} --shm-size=16g -it IMAGE"


def device_nodes(machine: SystemInfo) -> CheckResult:
    """/dev/davinci0 and its like, one per chip, and the files that go with them."""
    nodes = machine.nodes
    if not nodes:
        where = "not handed into this container" if machine.in_container else "no driver"
        other = "if this machine has no NPU: pip uninstall torch_npu; else: " if _may_be_none(machine) else ""
        return problem(f"no /dev/davinci0: no NPU, or {where}", f"{other}{install_command(machine)}")
    if missing := [path for path in MANAGERS if not machine.exists(path)]:
        return problem(f"{count_noun(len(nodes), 'chip')}, but no {', '.join(missing)}", install_command(machine))
    if locked := [path for path in (*nodes, *MANAGERS) if not machine.may(machine.path(path), os.R_OK | os.W_OK)]:
        return _no_access(machine, locked)
    return ok(f"{count_noun(len(nodes), 'chip')}: {nodes[0]}" + (f" … {nodes[-1]}" if len(nodes) > 1 else ""))


def _may_be_none(machine: SystemInfo) -> bool:
    """Whether torch_npu alone, which anybody can install, says that this is a machine with an NPU."""
    return machine.wanted == "auto" and machine.version("torch-npu") is not None


def _no_access(machine: SystemInfo, paths: Sequence[str]) -> CheckResult:
    """This user may not read and write device files: they belong to a group, and the user is not in it."""
    about = machine.path(paths[0]).stat()
    group = _facts(machine.read(INSTALLED)).get("usergroup", GROUP)
    seen = f"no right to use {', '.join(paths)} ({stat.filemode(about.st_mode)}, group {about.st_gid})"
    if machine.in_container:
        return problem(f"{seen}: this container's user is not in it", f"docker run --group-add {about.st_gid} …")
    return problem(f"{seen}: only root and the group {group} may", f"sudo usermod -aG {group} $USER, and log in again")


def container_mounts(machine: SystemInfo) -> CheckResult:
    """What the host must hand into a container, beside the devices."""
    if not machine.in_container or not machine.nodes:
        return skip("not in a container" if machine.nodes else "no device files")
    if missing := [path for path in MOUNTS if not machine.exists(path)]:
        return problem(f"in a container without {', '.join(missing)}", install_command(machine))
    return ok("the container has the devices, the driver and npu-smi of its host")


def driver(machine: SystemInfo) -> CheckResult:
    """The versions of driver and firmware, and whether the driver takes that firmware."""
    chosen = _facts(machine.read(INSTALLED)).get("driver_install_path_param", "/usr/local/Ascend").rstrip("/")
    driver_file, firmware_file = (path.replace("/usr/local/Ascend", chosen) for path in (DRIVER, FIRMWARE))
    facts = _facts(machine.read(driver_file))
    version = facts.get("package_version") or facts.get("version")
    if version is None:
        return problem(f"no {driver_file}", remedy_without_nodes(machine, install_command(machine)))
    firmware = _facts(machine.read(firmware_file)).get("version")
    if firmware is None:
        return ok(f"driver {version}; firmware: no {firmware_file} (usual in a container)")
    ranges = re.findall(r"\[([^,\]]+),([^\]]+)\]", facts.get("compatible_version_fw", ""))
    seen = f"driver {version}, firmware {firmware}"
    if not ranges:
        return ok(f"{seen}; the driver does not say which firmware it takes")
    if not any(_within(firmware, low, high) for low, high in ranges):
        takes = " or ".join(f"{low} to {high}" for low, high in ranges)
        return problem(
            f"{seen}; the driver takes firmware {takes}",
            f"{FIRMWARE_RUN} && reboot",
        )
    return ok(seen)


def logs(machine: SystemInfo) -> CheckResult:
    """Where CANN writes what torch_npu's errors leave out."""
    home = machine.environment.get("ASCEND_PROCESS_LOG_PATH")
    folder = home or f"{machine.environment.get('HOME', '/root')}/ascend/log"
    place = f"{folder}/debug/plog"
    if not machine.exists(place):
        return skip(f"none yet; they will be in {place}")
    return ok(f"{count_noun(len(machine.glob(f'{place}/plog-*.log')), 'file')} in {place}")


def remedy_without_nodes(machine: SystemInfo, remedy: str) -> str:
    """Without device files their remedy is the one for everything that comes with the driver."""
    return remedy if machine.nodes else device_nodes(machine).remedy or remedy


def _facts(text: str | None) -> dict[str, str]:
    """`key=value` lines, keys in lower case."""
    pairs = (line.partition("=") for line in (text or "").splitlines())
    return {key.strip().lower(): value.strip() for key, equals, value in pairs if equals}


def _within(version: str, low: str, high: str) -> bool:
    """Whether 8.9.9.1.129 lies in 7.0.0 … 8.9.9, whose end stands for all that begin like it."""
    number, first, last = ([int(part) for part in re.findall(r"\d+", text)] for text in (version, low, high))
    return first <= number and number[: len(last)] <= last
