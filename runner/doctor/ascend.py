"""Checks of an NPU's hardware side: device files, driver and firmware, what npu-smi says."""

from __future__ import annotations

import os
import re
from collections import Counter

from runner.device import npu_smi
from runner.device.soc import Generation, generation, soc_name
from runner.doctor.finding import Finding, many, ok, problem, skipped, unknown, warning
from runner.doctor.machine import Answer, Machine

DRIVER = "/usr/local/Ascend/driver/version.info"
FIRMWARE = "/usr/local/Ascend/firmware/version.info"
MANAGERS = ("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc")
# What a container needs of its host: path → how it is handed in.
MOUNTS = {
    **{path: f"--device {path}" for path in MANAGERS},
    "/usr/local/Ascend/driver/version.info": "-v /usr/local/Ascend/driver:/usr/local/Ascend/driver",
    "/usr/local/bin/npu-smi": "-v /usr/local/bin/npu-smi:/usr/local/bin/npu-smi",
    "/usr/local/dcmi": "-v /usr/local/dcmi:/usr/local/dcmi",
    "/etc/ascend_install.info": "-v /etc/ascend_install.info:/etc/ascend_install.info",
}
INSTALL_DRIVER = "bash Ascend-hdk-<product>-npu-driver_<version>_linux-<arch>.run --full && reboot"
FOREIGN_SHARE = 0.1  # of a chip's memory; an idle 64 GB chip itself holds about 3 GB
REMARKS: dict[Generation, str] = {
    "first": "not A2, whose name it nearly has: wheels and kernels of A2 do not fit it",
    "310P": "made for inference; nobody has trained with this project on it",
    "310B": "made for inference; nobody has trained with this project on it",
    "950": "torch_npu's documents list torch's attention (SDPA) and FSDP2 as not supported on it",
    "unknown": "a name that the doctor's table does not have",
}
# What joins two chips directly; everything else goes over PCIe or the host.
FAST_LINKS = ("HCCS", "HCCS_SW", "SIO")


def is_present(machine: Machine) -> bool:
    """Whether anything of an NPU is on this machine, its software included."""
    return bool(
        machine.nodes
        or any(map(machine.exists, (DRIVER, "/usr/local/Ascend", "/usr/local/bin/npu-smi")))
        or any(machine.version(name) for name in ("torch-npu", "vllm-ascend"))
        or "ASCEND_HOME_PATH" in machine.environment
    )


def hand_in(machine: Machine) -> str:
    """The command that brings driver and devices here: into this container, or onto this machine."""
    if not machine.in_container:
        return INSTALL_DRIVER
    flags = [flag for path, flag in MOUNTS.items() if not machine.exists(path)]
    return f"docker run {' '.join([*([] if machine.nodes else ['--device /dev/davinci0']), *flags])} --shm-size=16g …"


def device_nodes(machine: Machine) -> Finding:
    """/dev/davinci0 and its like, one per chip, and the files that go with them."""
    nodes = machine.nodes
    if not nodes:
        where = "not handed into this container" if machine.in_container else "no driver"
        other = "if this machine has no NPU: pip uninstall torch_npu; else: " if machine.version("torch-npu") else ""
        return problem(f"no /dev/davinci0: no NPU, or {where}", f"{other}{hand_in(machine)}")
    if missing := [path for path in MANAGERS if not machine.exists(path)]:
        return problem(f"{many(len(nodes), 'chip')}, but no {', '.join(missing)}", hand_in(machine))
    if locked := [path for path in (*nodes, *MANAGERS) if not os.access(machine.path(path), os.R_OK | os.W_OK)]:
        return problem(f"no right to use {', '.join(locked)}", "sudo usermod -aG HwHiAiUser $USER, and log in again")
    return ok(f"{many(len(nodes), 'chip')}: {nodes[0]}" + (f" … {nodes[-1]}" if len(nodes) > 1 else ""))


def container_mounts(machine: Machine) -> Finding:
    """What the host must hand into a container, beside the devices."""
    if not machine.in_container or not machine.nodes:
        return skipped("not in a container" if machine.nodes else "no device files")
    if missing := [path for path in MOUNTS if not machine.exists(path)]:
        return problem(f"in a container without {', '.join(missing)}", hand_in(machine))
    return ok("the container has the devices, the driver and npu-smi of its host")


def driver(machine: Machine) -> Finding:
    """The versions of driver and firmware, and whether the driver takes that firmware."""
    facts, firmware_facts = (_facts(machine.read(path)) for path in (DRIVER, FIRMWARE))
    version = facts.get("package_version") or facts.get("version")
    if version is None:
        return problem(f"no {DRIVER}", _first(machine, hand_in(machine)))
    firmware = firmware_facts.get("version")
    if firmware is None:
        return ok(f"driver {version}; firmware: no {FIRMWARE} (usual in a container)")
    ranges = re.findall(r"\[([^,\]]+),([^\]]+)\]", facts.get("compatible_version_fw", ""))
    seen = f"driver {version}, firmware {firmware}"
    if not ranges:
        return ok(f"{seen}; the driver does not say which firmware it takes")
    if not any(_within(firmware, low, high) for low, high in ranges):
        takes = " or ".join(f"{low} to {high}" for low, high in ranges)
        return problem(
            f"{seen}; the driver takes firmware {takes}",
            "bash Ascend-hdk-<product>-npu-firmware_<version>.run --full && reboot",
        )
    return ok(seen)


def products(machine: Machine) -> Finding:
    """What npu-smi lists: products, health."""
    answer = machine.ask("npu-smi", "info")
    try:
        info = npu_smi.parse_info(answer.out)
    except ValueError as error:
        return _no_table(machine, answer, error)
    return _judge(info, soc(machine))


def _no_table(machine: Machine, answer: Answer, error: ValueError) -> Finding:
    """Why npu-smi shows no chips: it is missing, hangs, fails, or prints what the doctor cannot read."""
    if answer.late:
        return problem(f"npu-smi {answer.last_line}: the driver or a card hangs", "dmesg | tail; then reboot")
    if answer.code is None:
        remedy = "export PATH=/usr/local/bin:$PATH" if machine.exists("/usr/local/bin/npu-smi") else hand_in(machine)
        return problem(f"npu-smi does not answer: {answer.last_line}", _first(machine, remedy))
    if answer.code or npu_smi.FAILED.search(answer.out + answer.err):
        rights = "lsmod | grep drv_davinci; sudo usermod -aG HwHiAiUser $USER (and log in again); then reboot"
        return problem(
            f"npu-smi does not reach the driver: {answer.last_line}",
            hand_in(machine) if machine.in_container else rights,
        )
    return unknown(f"{error}; it ends: {answer.last_line}")


def _judge(info: npu_smi.Info, soc_found: str | None) -> Finding:
    names = Counter(chip.name for chip in info.chips)
    listed = ", ".join(f"{count} × {name}" for name, count in names.items())
    kinds = {generation(soc_found or name) for name in names}
    labels = ", ".join("first generation" if kind == "first" else kind for kind in sorted(kinds))
    seen = f"{listed} ({labels}{f', SoC {soc_found}' if soc_found else ''}), npu-smi {info.version}"
    ill = [f"{c.card}/{c.chip} {c.health}" for c in info.chips if c.health != "OK"]
    if ill:
        return problem(f"{seen}; health of {', '.join(ill)}", "npu-smi info -t health -i <NPU>")
    if len(names) > 1:
        return warning(f"{seen}: different products; a job should see one kind", "export ASCEND_RT_VISIBLE_DEVICES=…")
    remarks = [REMARKS[kind] for kind in sorted(kinds) if kind in REMARKS]
    return warning(f"{seen}: {'; '.join(remarks)}") if remarks else ok(seen)


def memory_in_use(machine: Machine) -> Finding:
    """Whether somebody else is on the chips: memory in use and processes."""
    info = info_of(machine)
    if info is None:
        return skipped("npu-smi lists no chips")
    full = [
        f"{c.card}/{c.chip} {c.memory_used_mb} of {c.memory_total_mb} MB"
        for c in info.chips
        if c.memory_used_mb and c.memory_total_mb and c.memory_used_mb > FOREIGN_SHARE * c.memory_total_mb
    ]
    used = [f"{p.pid} {p.name or '?'} on {p.card}/{p.chip} ({p.memory_mb} MB)" for p in info.processes]
    if full or used:
        what = [*(["in use: " + ", ".join(full)] if full else []), *(["processes: " + ", ".join(used)] if used else [])]
        return warning("; ".join(what), "wait, end them, or choose free chips: export ASCEND_RT_VISIBLE_DEVICES=…")
    sizes = sorted({c.memory_total_mb for c in info.chips if c.memory_total_mb})
    return ok(f"{many(len(info.chips), 'chip')} free, {' or '.join(map(str, sizes))} MB each")


def topology(machine: Machine) -> Finding:
    """How the chips reach one another."""
    info = info_of(machine)
    if info is None or len(info.chips) < 2:
        return skipped("fewer than two chips")
    answer = machine.ask("npu-smi", "info", "-t", "topo")
    try:
        links = npu_smi.parse_topology(answer.out)
    except ValueError as error:
        return unknown(str(error))
    kinds = Counter(links.values())
    seen = ", ".join(f"{many(count // 2, 'pair')} {kind}" for kind, count in kinds.most_common())
    slow = sum(count for kind, count in kinds.items() if kind not in FAST_LINKS)
    return ok(seen) if slow < sum(kinds.values()) else warning(f"{seen}: all traffic goes over the host")


def numbering(machine: Machine) -> Finding:
    """npu-smi's chips against the device files: a container may have fewer of one than of the other."""
    info = info_of(machine)
    if info is None:
        return skipped("npu-smi lists no chips")
    listed, files = len(info.chips), len(machine.nodes)
    if files and listed != files:
        return warning(
            f"npu-smi lists {many(listed, 'chip')}, /dev has {files}: programs see the smaller number",
            "docker run with one --device /dev/davinciN per chip" if machine.in_container else "npu-smi info -m",
        )
    try:
        places = npu_smi.parse_mapping(machine.ask("npu-smi", "info", "-m").out)
    except ValueError as error:
        return unknown(str(error))
    moved = [f"{p.logical} = /dev/davinci{p.physical}" for p in places if p.logical != p.physical]
    return ok("logical and physical numbers are the same" if not moved else f"logical {', '.join(moved)}")


def _first(machine: Machine, remedy: str) -> str:
    """Without device files their remedy is the one for everything that comes with the driver."""
    return remedy if machine.nodes else device_nodes(machine).remedy or remedy


def info_of(machine: Machine) -> npu_smi.Info | None:
    """What `npu-smi info` lists; None where it does not (the check `npu-smi` says why)."""
    try:
        return npu_smi.parse_info(machine.ask("npu-smi", "info").out)
    except ValueError:
        return None


def soc(machine: Machine) -> str | None:
    """The SoC's name of the first card."""
    info = info_of(machine)
    if info is None:
        return None
    answer = machine.ask("npu-smi", "info", "-t", "board", "-i", str(info.chips[0].card), "-c", "0")
    if answer.code:  # the 950 takes no -c
        answer = machine.ask("npu-smi", "info", "-t", "board", "-i", str(info.chips[0].card))
    records = npu_smi.parse_records(answer.out)
    return soc_name(records[0]) if records else None


def _facts(text: str | None) -> dict[str, str]:
    """`key=value` lines, keys in lower case."""
    pairs = (line.partition("=") for line in (text or "").splitlines())
    return {key.strip().lower(): value.strip() for key, equals, value in pairs if equals}


def _within(version: str, low: str, high: str) -> bool:
    """Whether 8.9.9.1.129 lies in 7.0.0 … 8.9.9, whose end stands for all that begin like it."""
    number, first, last = ([int(part) for part in re.findall(r"\d+", text)] for text in (version, low, high))
    return first <= number and number[: len(last)] <= last
