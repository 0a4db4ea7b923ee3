"""The examination: which checks there are, in which order, and which apply to this machine.

machine ─▶ npu ─▶ cuda ─▶ a plug-in's device ─▶ any device ─▶ a tiny real run on each device
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from runner.device import kinds
from runner.device.visible import VARIABLES
from runner.tools.doctor import (
    ascend,
    cann,
    driver,
    hccl,
    host,
    imports,
    nvidia,
    operators,
    packages,
    serving,
    trials,
    variables,
)
from runner.tools.doctor.finding import ANY_DEVICE, Entry, Finding, Verdict, skipped
from runner.tools.doctor.machine import SIMULATED_CARDS, Machine, trial_simulator

Check = tuple[str, Callable[[Machine], Finding]]

HOST: tuple[Check, ...] = (("platform", host.platform),)
NPU_VARIABLES: tuple[Check, ...] = (
    ("allocator", partial(variables.allocator, kind=kinds.NPU)),
    ("HCCL time-outs", hccl.timeouts),
    ("HCCL network", hccl.network),
    ("other variables", variables.choices),
)
NPU: tuple[Check, ...] = (
    ("device files", driver.device_nodes),
    ("driver, firmware", driver.driver),
    ("npu-smi", ascend.products),
    ("in use", ascend.memory_in_use),
    ("topology", ascend.topology),
    ("numbering", ascend.numbering),
    ("CANN", cann.toolkit),
    ("CANN operators", operators.operators),
    ("CANN environment", cann.sourced),
    ("CANN's Python", operators.python_packages),
    ("CANN's logs", driver.logs),
    ("ATB", cann.atb),
    ("torch, torch_npu", packages.torch_pair),
    ("torch_npu, CANN", packages.torch_npu_and_cann),
    ("vllm, vllm-ascend", packages.vllm_pair),
    ("wheel, chip", packages.wheel_and_soc),
    ("engine on NPU", serving.npu_engine),
    ("Python", partial(host.python, names=("torch-npu", "vllm", "vllm-ascend"))),
    *NPU_VARIABLES,
    ("visible devices", lambda machine: variables.visible(machine, kinds.NPU, npu_count)),
    ("container mounts", driver.container_mounts),
    ("import torch", imports.torch_with_npu),
)
CUDA: tuple[Check, ...] = (
    ("device files", nvidia.device_nodes),
    ("nvidia-smi", nvidia.products),
    ("in use", nvidia.memory_in_use),
    ("topology", nvidia.topology),
    ("driver, CUDA", nvidia.driver),
    ("allocator", partial(variables.allocator, kind=kinds.CUDA)),
    ("visible devices", partial(variables.visible, kind=kinds.CUDA, count=nvidia.count)),
)
ANY: tuple[Check, ...] = (
    ("Python", host.python),
    ("disk", host.disk),
    ("shared memory", host.shared_memory),
    ("W&B", host.wandb),
    ("antlr", packages.antlr),
    ("demands", packages.pins),
    ("vLLM", serving.vllm),
    ("Ray", serving.ray),
    ("import torch", imports.torch_alone),
)


def examine(machine: Machine, *, trial: bool = True, debug: bool = False) -> Iterator[Entry]:
    """Every finding, in order, as it is made. A check that fails is a finding of its own and stops no other."""
    yield from _group("machine", HOST, machine, debug)
    for name, checks, is_present, sign in (
        ("npu", NPU, driver.is_present, "no sign of an Ascend NPU (device files, driver, CANN, torch_npu)"),
        ("cuda", CUDA, nvidia.is_present, "no sign of an NVIDIA GPU (device files, driver)"),
    ):
        if machine.wanted == name or (machine.wanted == "auto" and is_present(machine)):
            yield from _group(name, checks, machine, debug)
        else:
            asked = f"device={machine.wanted} was asked for"
            yield Entry(name, "", skipped(sign if machine.wanted == "auto" else asked))
    yield from _group(machine.wanted, trials.own_checks(machine.wanted), machine, debug)
    yield from _group(ANY_DEVICE, ANY, machine, debug)
    for device in trials.devices(machine) if trial else ():
        yield from _group(f"trial on {device}", tuple(trials.of_device(device, count(machine, device))), machine, debug)


def looked_at(machine: Machine) -> list[str]:
    """The devices that the examination is about: the one asked for, or all of which there is a sign."""
    if machine.wanted != "auto":
        return [machine.wanted]
    signs = {"npu": driver.is_present, "cuda": nvidia.is_present}
    return ["cpu", *(device for device, is_present in signs.items() if is_present(machine))]


def npu_count(machine: Machine) -> int:
    """How many chips there are: device files, or what npu-smi lists."""
    info = ascend.info_of(machine)
    return len(machine.nodes) or (len(info.chips) if info else 0)


def count(machine: Machine, device: str) -> int:
    """How many devices of this kind a process sees."""
    if device == "cpu":
        return 1
    if trial_simulator(device):
        return SIMULATED_CARDS
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
