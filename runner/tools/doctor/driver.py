"""Checks of an NPU: driver, device files, containers; products, health and memory by npu-smi."""

from __future__ import annotations

import math
import os
import re
import stat
from collections import Counter
from collections.abc import Sequence

from runner.device import npu_smi
from runner.device.ascend import CHIPS, generation, soc_name
from runner.tools.doctor.report import CheckResult, ok, problem, skip, unknown, wait_or_choose, warning
from runner.tools.doctor.system_info import CommandResult, SystemInfo
from runner.tracker.text import count_noun

DRIVER = "/usr/local/Ascend/driver/version.info"
FIRMWARE = "/usr/local/Ascend/firmware/version.info"
INSTALLED = "/etc/ascend_install.info"  # where the driver was put, and the group that may use its devices
GROUP = "HwHiAiUser"
MANAGERS = ("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc")
# What a container needs of its host: path → how it is passed in.
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
    return machine.docker_run(*flags, "--shm-size=16g")


def device_nodes(machine: SystemInfo) -> CheckResult:
    """/dev/davinci0 and so on, one per chip, and the files that go with them."""
    nodes = machine.nodes
    if not nodes:
        where = "not passed to this container" if machine.in_container else "no driver"
        is_sure = machine.wanted != "auto" or machine.version("torch-npu") is None
        other = "" if is_sure else "if this machine has no NPU: pip uninstall torch_npu; else: "
        return problem(f"no /dev/davinci0: no NPU, or {where}", f"{other}{install_command(machine)}")
    if missing := [path for path in MANAGERS if not machine.exists(path)]:
        return problem(f"{count_noun(len(nodes), 'chip')}, but no {', '.join(missing)}", install_command(machine))
    if locked := [path for path in (*nodes, *MANAGERS) if not machine.may(machine.path(path), os.R_OK | os.W_OK)]:
        return _no_access(machine, locked)
    return ok(f"{count_noun(len(nodes), 'chip')}: {nodes[0]}" + (f" … {nodes[-1]}" if len(nodes) > 1 else ""))


def _no_access(machine: SystemInfo, paths: Sequence[str]) -> CheckResult:
    """This user may not read and write device files: they belong to a group, and the user is not in it."""
    about = machine.path(paths[0]).stat()
    group = _facts(machine.read(INSTALLED)).get("usergroup", GROUP)
    seen = f"no permission for {', '.join(paths)} ({stat.filemode(about.st_mode)}, group {about.st_gid})"
    if machine.in_container:
        return problem(f"{seen}: this container's user is not in it", machine.docker_run(f"--group-add {about.st_gid}"))
    return problem(f"{seen}: only for root and group {group}", f"sudo usermod -aG {group} $USER, and log in again")


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
        return ok(f"{seen}; the driver does not list its firmware versions")
    if not any(_within(firmware, low, high) for low, high in ranges):
        takes = " or ".join(f"{low} to {high}" for low, high in ranges)
        return problem(f"{seen}; the driver supports firmware {takes}", f"{FIRMWARE_RUN} && reboot")
    return ok(seen)


def logs(machine: SystemInfo) -> CheckResult:
    """Where CANN writes what torch_npu's errors leave out."""
    home = machine.environment.get("ASCEND_PROCESS_LOG_PATH")
    folder = home or f"{machine.environment.get('HOME', '/root')}/ascend/log"
    place = f"{folder}/debug/plog"
    if not machine.exists(place):
        return skip(f"none yet; they appear in {place}")
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


FOREIGN_SHARE = 0.1  # of a chip's memory; an idle 64 GB chip itself holds about 3 GB
UNKNOWN = "a name that the doctor's table does not have"
# What joins two chips directly; everything else goes over PCIe or the host.
FAST_LINKS = ("HCCS", "HCCS_SW", "SIO")


def products(machine: SystemInfo) -> CheckResult:
    """What npu-smi lists: products, health."""
    answer = machine.command_result("npu-smi", "info")
    try:
        info = npu_smi.parse_info(answer.out)
    except ValueError as error:
        return _no_table(machine, answer, error)
    return _product_result(info, soc_of_first_card(machine))


def _no_table(machine: SystemInfo, answer: CommandResult, error: ValueError) -> CheckResult:
    """Why npu-smi shows no chips: it is missing, hangs, fails, or prints what the doctor cannot read."""
    if answer.late:
        return problem(f"npu-smi {answer.last_line}: the driver or a card hangs", "dmesg | tail; then reboot")
    if answer.code is None:
        remedy = (
            "export PATH=/usr/local/bin:$PATH" if machine.exists("/usr/local/bin/npu-smi") else install_command(machine)
        )
        return problem(f"npu-smi does not respond: {answer.last_line}", remedy_without_nodes(machine, remedy))
    if answer.code or npu_smi.FAILED.search(answer.out + answer.err):
        rights = "lsmod | grep drv_davinci; sudo usermod -aG HwHiAiUser $USER (and log in again); then reboot"
        return problem(
            f"npu-smi cannot reach the driver: {answer.last_line}",
            install_command(machine) if machine.in_container else rights,
        )
    return unknown(f"{error}; last line: {answer.last_line}")


def _product_result(info: npu_smi.NpuInfo, soc_found: str | None) -> CheckResult:
    names = Counter(chip.name for chip in info.chips)
    listed = ", ".join(f"{count} × {name}" for name, count in names.items())
    kinds = {generation(soc_found or name) for name in names}
    labels = ", ".join("first generation" if kind == "first" else kind for kind in sorted(kinds))
    seen = f"{listed} ({labels}{f', SoC {soc_found}' if soc_found else ''}), npu-smi {info.version}"
    ill = [c for c in info.chips if c.health != "OK"]
    if ill:
        said = ", ".join(f"{c.card}/{c.chip} {c.health}" for c in ill)
        return problem(f"{seen}; health of {said}", f"npu-smi info -t health -i {ill[0].card}")
    if len(names) > 1:
        alike = [str(number) for number, chip in enumerate(info.chips) if chip.name == names.most_common(1)[0][0]]
        remedy = f"export ASCEND_RT_VISIBLE_DEVICES={','.join(alike)}"
        return warning(f"{seen}: different products; use one kind in a job", remedy)
    remarks = [CHIPS[kind].remark if kind in CHIPS else UNKNOWN for kind in sorted(kinds)]
    said = "; ".join(filter(None, remarks))
    return warning(f"{seen}: {said}") if said else ok(seen)


def memory_in_use(machine: SystemInfo) -> CheckResult:
    """Whether somebody else is on the chips: memory in use and processes."""
    info = info_of(machine)
    if info is None:
        return skip("npu-smi lists no chips")
    crowded = [c for c in info.chips if (c.memory_used_mb or 0) > FOREIGN_SHARE * (c.memory_total_mb or math.inf)]
    full = [f"{c.card}/{c.chip} {c.memory_used_mb} of {c.memory_total_mb} MB" for c in crowded]
    used = [f"{p.pid} {p.name or '?'} on {p.card}/{p.chip} ({p.memory_mb} MB)" for p in info.processes]
    if full or used:
        what = [*(["in use: " + ", ".join(full)] if full else []), *(["processes: " + ", ".join(used)] if used else [])]
        taken = {(c.card, c.chip) for c in crowded} | {(p.card, p.chip) for p in info.processes}
        free = [str(number) for number, c in enumerate(info.chips) if (c.card, c.chip) not in taken]
        return warning("; ".join(what), wait_or_choose("ASCEND_RT_VISIBLE_DEVICES", free))
    sizes = sorted({c.memory_total_mb for c in info.chips if c.memory_total_mb})
    return ok(f"{count_noun(len(info.chips), 'chip')} free, {' or '.join(map(str, sizes))} MB each")


def topology(machine: SystemInfo) -> CheckResult:
    """How the chips reach one another."""
    info = info_of(machine)
    if info is None or len(info.chips) < 2:
        return skip("fewer than two chips")
    answer = machine.command_result("npu-smi", "info", "-t", "topo")
    try:
        links = npu_smi.parse_topology(answer.out)
    except ValueError as error:
        return unknown(str(error))
    kinds = Counter(links.values())
    seen = ", ".join(f"{count_noun(count // 2, 'pair')} {kind}" for kind, count in kinds.most_common())
    slow = sum(count for kind, count in kinds.items() if kind not in FAST_LINKS)
    return ok(seen) if slow < sum(kinds.values()) else warning(f"{seen}: all traffic goes over the host")


def numbering(machine: SystemInfo) -> CheckResult:
    """npu-smi's chips against the device files: a container may have fewer of one than of the other."""
    info = info_of(machine)
    if info is None:
        return skip("npu-smi lists no chips")
    listed, files = len(info.chips), len(machine.nodes)
    if files and listed != files:
        flags = [f"--device /dev/davinci{number}" for number in range(max(listed, files))]
        remedy = machine.docker_run(*flags) if machine.in_container else "npu-smi info -m"
        seen = f"npu-smi lists {count_noun(listed, 'chip')}, /dev has {files}"
        return warning(f"{seen}: programs use the smaller number", remedy)
    try:
        places = npu_smi.parse_mapping(machine.command_result("npu-smi", "info", "-m").out)
    except ValueError as error:
        return unknown(str(error))
    moved = [f"{p.logical} = /dev/davinci{p.physical}" for p in places if p.logical != p.physical]
    return ok("logical and physical numbers are the same" if not moved else f"logical {', '.join(moved)}")


def info_of(machine: SystemInfo) -> npu_smi.NpuInfo | None:
    """What `npu-smi info` lists; None where it does not (the check `npu-smi` says why)."""
    try:
        return npu_smi.parse_info(machine.command_result("npu-smi", "info").out)
    except ValueError:
        return None


def soc_of_first_card(machine: SystemInfo) -> str | None:
    """The SoC's name of the first card."""
    info = info_of(machine)
    if info is None:
        return None
    answer = machine.command_result("npu-smi", "info", "-t", "board", "-i", str(info.chips[0].card), "-c", "0")
    if answer.code:  # the 950 takes no -c
        answer = machine.command_result("npu-smi", "info", "-t", "board", "-i", str(info.chips[0].card))
    records = npu_smi.parse_records(answer.out)
    return soc_name(records[0]) if records else None
