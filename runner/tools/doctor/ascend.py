"""Checks of NPUs by what npu-smi says: products, health, memory in use, topology, numbers."""

from __future__ import annotations

from collections import Counter

from runner.device import npu_smi
from runner.device.ascend import CHIPS, generation, soc_name
from runner.tools.doctor.check_result import CheckResult, ok, problem, skip, unknown, warning
from runner.tools.doctor.driver import install_command, remedy_without_nodes
from runner.tools.doctor.system_info import CommandResult, SystemInfo
from runner.tracker.text import count_noun

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
        return problem(f"npu-smi does not answer: {answer.last_line}", remedy_without_nodes(machine, remedy))
    if answer.code or npu_smi.FAILED.search(answer.out + answer.err):
        rights = "lsmod | grep drv_davinci; sudo usermod -aG HwHiAiUser $USER (and log in again); then reboot"
        return problem(
            f"npu-smi does not reach the driver: {answer.last_line}",
            install_command(machine) if machine.in_container else rights,
        )
    return unknown(f"{error}; it ends: {answer.last_line}")


def _product_result(info: npu_smi.NpuInfo, soc_found: str | None) -> CheckResult:
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
    remarks = [CHIPS[kind].remark if kind in CHIPS else UNKNOWN for kind in sorted(kinds)]
    said = "; ".join(filter(None, remarks))
    return warning(f"{seen}: {said}") if said else ok(seen)


def memory_in_use(machine: SystemInfo) -> CheckResult:
    """Whether somebody else is on the chips: memory in use and processes."""
    info = info_of(machine)
    if info is None:
        return skip("npu-smi lists no chips")
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
        return warning(
            f"npu-smi lists {count_noun(listed, 'chip')}, /dev has {files}: programs see the smaller number",
            "docker run with one --device /dev/davinciN per chip" if machine.in_container else "npu-smi info -m",
        )
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
