"""The examination: which checks there are, in which order, and which apply to this machine.

machine ─▶ npu ─▶ cuda ─▶ packages ─▶ a tiny real run on each device
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from runner.device.visible import VARIABLES
from runner.doctor import ascend, cann, host, imports, nvidia, packages, trials, variables
from runner.doctor.finding import Entry, Finding, Verdict, skipped
from runner.doctor.machine import Machine

Check = tuple[str, Callable[[Machine], Finding]]

HOST: tuple[Check, ...] = (
    ("platform", host.platform),
    ("python", host.python),
    ("disk", host.disk),
    ("shared memory", host.shared_memory),
    ("W&B", host.wandb),
)
NPU: tuple[Check, ...] = (
    ("device files", ascend.device_nodes),
    ("container mounts", ascend.container_mounts),
    ("driver, firmware", ascend.driver),
    ("npu-smi", ascend.products),
    ("in use", ascend.memory_in_use),
    ("topology", ascend.topology),
    ("numbering", ascend.numbering),
    ("CANN", cann.toolkit),
    ("CANN environment", cann.sourced),
    ("ATB", cann.atb),
    ("torch, torch_npu", packages.torch_pair),
    ("torch_npu, CANN", packages.torch_npu_and_cann),
    ("vllm, vllm-ascend", packages.vllm_pair),
    ("wheel, chip", packages.wheel_and_soc),
    ("allocator", variables.npu_allocator),
    ("HCCL time-outs", variables.hccl),
    ("other variables", variables.choices),
    ("visible devices", lambda machine: variables.npu_visible(machine, npu_count)),
    ("import torch", imports.torch_with_npu),
)
CUDA: tuple[Check, ...] = (
    ("device files", nvidia.device_nodes),
    ("nvidia-smi", nvidia.products),
    ("driver, CUDA", nvidia.driver),
    ("in use", nvidia.memory_in_use),
    ("topology", nvidia.topology),
    ("allocator", variables.cuda_allocator),
    ("visible devices", lambda machine: variables.cuda_visible(machine, nvidia.count)),
)
PACKAGES: tuple[Check, ...] = (
    ("antlr", packages.antlr),
    ("demands", packages.pins),
    ("import torch", imports.torch_alone),
)


def examine(machine: Machine, *, trial: bool = True, debug: bool = False) -> Iterator[Entry]:
    """Every finding, in order, as it is made. A check that fails is a finding of its own and stops no other."""
    yield from _group("machine", HOST, machine, debug)
    for name, checks, is_present, sign in (
        ("npu", NPU, ascend.is_present, "no sign of an Ascend NPU (device files, driver, CANN, torch_npu)"),
        ("cuda", CUDA, nvidia.is_present, "no sign of an NVIDIA GPU (device files, driver)"),
    ):
        if machine.wanted not in ("auto", name):
            yield Entry(name, "", skipped(f"device={machine.wanted} was asked for"))
        elif machine.wanted == "auto" and not is_present(machine):
            yield Entry(name, "", skipped(sign))
        else:
            yield from _group(name, checks, machine, debug)
    yield from _group("packages", PACKAGES, machine, debug)
    for device in trials.devices(machine) if trial else ():
        yield from _group(f"trial on {device}", tuple(trials.of_device(device, count(machine, device))), machine, debug)


def looked_at(machine: Machine) -> list[str]:
    """The devices that the examination is about: the one asked for, or all of which there is a sign."""
    if machine.wanted != "auto":
        return [machine.wanted]
    signs = {"npu": ascend.is_present, "cuda": nvidia.is_present}
    return ["cpu", *(device for device, is_present in signs.items() if is_present(machine))]


def npu_count(machine: Machine) -> int:
    """How many chips there are: device files, or what npu-smi lists."""
    info = ascend.info_of(machine)
    return len(machine.nodes) or (len(info.chips) if info else 0)


def count(machine: Machine, device: str) -> int:
    """How many devices of this kind a process sees."""
    if device == "cpu":
        return 1
    there = npu_count(machine) if device == "npu" else nvidia.count(machine)
    text = machine.environment.get(VARIABLES[device])
    return there if text is None else min(there, len([entry for entry in text.split(",") if entry.strip()]))


def _group(name: str, checks: Sequence[Check], machine: Machine, debug: bool) -> Iterator[Entry]:
    for check, look in checks:
        try:
            found = look(machine)
        except Exception as error:
            found = _bug(error, debug)
        yield Entry(name, check, found)


def _bug(error: Exception, debug: bool) -> Finding:
    """A check that fails is wrong itself: said as such, with the place."""
    if debug:
        traceback.print_exc(file=sys.stderr)
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(last.filename).name}:{last.lineno}"
    return Finding(Verdict.BUG, f"this check failed, which is a bug of ours: {type(error).__name__}: {error} ({place})")
