"""The examination: which checks there are, in which order, and which apply to this machine.

machine ─▶ npu ─▶ cuda ─▶ a plug-in's device ─▶ any device ─▶ the parts of a job ─▶ a tiny real run on each device
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from runner.core import device_kinds
from runner.core.device_kinds import VARIABLES
from runner.core.errors import RunnerError
from runner.tools.doctor import cann, driver, env_variables, nvidia, packages, smoke_tests, system_info
from runner.tools.doctor.report import ANY_DEVICE, CheckResult, CheckStatus, ReportEntry, ok, problem, skip
from runner.tools.doctor.system_info import SIMULATED_CARDS, SystemInfo, trial_simulator

Check = tuple[str, Callable[[SystemInfo], CheckResult]]

HOST: tuple[Check, ...] = (("platform", system_info.system_platform),)
NPU_VARIABLES: tuple[Check, ...] = (
    ("allocator", partial(env_variables.allocator, kind=device_kinds.NPU)),
    ("HCCL timeouts", env_variables.timeouts),
    ("HCCL network", env_variables.network),
    ("other variables", env_variables.choices),
)
NPU: tuple[Check, ...] = (
    ("device files", driver.device_nodes),
    ("driver, firmware", driver.driver),
    ("npu-smi", driver.products),
    ("in use", driver.memory_in_use),
    ("topology", driver.topology),
    ("numbering", driver.numbering),
    ("CANN", cann.toolkit),
    ("CANN operators", cann.operators),
    ("CANN environment", cann.cann_environment),
    ("CANN's Python", cann.python_packages),
    ("CANN's logs", driver.logs),
    ("ATB", cann.atb),
    ("torch, torch_npu", packages.torch_pair),
    ("torch_npu, CANN", packages.torch_npu_and_cann),
    ("vllm, vllm-ascend", packages.vllm_pair),
    ("wheel, chip", packages.wheel_and_soc),
    ("engine on NPU", packages.npu_engine),
    ("Python", partial(system_info.python, names=("torch-npu", "vllm", "vllm-ascend"))),
    *NPU_VARIABLES,
    ("visible devices", lambda machine: env_variables.visible(machine, device_kinds.NPU, npu_count)),
    ("container mounts", driver.container_mounts),
    ("import torch", smoke_tests.torch_with_npu),
)
CUDA: tuple[Check, ...] = (
    ("device files", nvidia.device_nodes),
    ("nvidia-smi", nvidia.products),
    ("in use", nvidia.memory_in_use),
    ("topology", nvidia.topology),
    ("driver, CUDA", nvidia.driver),
    ("allocator", partial(env_variables.allocator, kind=device_kinds.CUDA)),
    ("visible devices", partial(env_variables.visible, kind=device_kinds.CUDA, count=nvidia.count)),
)
ANY: tuple[Check, ...] = (
    ("Python", system_info.python),
    ("disk", system_info.disk),
    ("shared memory", system_info.shared_memory),
    ("W&B", system_info.wandb),
    ("SwanLab", system_info.swanlab),
    ("antlr", packages.antlr),
    ("demands", packages.pins),
    ("vLLM", packages.vllm),
    ("Ray", packages.ray),
    ("Slurm", packages.slurm),
    ("import torch", smoke_tests.torch_alone),
)
IMPORTS = (smoke_tests.torch_alone, smoke_tests.torch_with_npu)


def run_checks(machine: SystemInfo, *, trial: bool = True, debug: bool = False) -> Iterator[ReportEntry]:
    """All findings in order, as they are made. A check that fails is a finding and stops no other.

    For a job, torch is imported only where nothing is wrong by then: what is missing is listed in a second.
    """
    wrong = False
    for group, checks in _groups(machine, trial):
        for check, look in checks:
            if wrong and machine.parts and look in IMPORTS:
                found = skip("fix the problems above first")
            else:
                found = _run_check(look, machine, debug)
            wrong = wrong or found.verdict is CheckStatus.PROBLEM
            yield ReportEntry(group, check, found)


def _groups(machine: SystemInfo, trial: bool) -> Iterator[tuple[str, Sequence[Check]]]:
    """The checks by group; one without a name says why its group does not apply."""
    yield "machine", HOST
    for name, checks, is_present, sign in (
        ("npu", NPU, driver.is_present, "no sign of an Ascend NPU (device files, driver, CANN, torch_npu)"),
        ("cuda", CUDA, nvidia.is_present, "no sign of an NVIDIA GPU (device files, driver)"),
    ):
        if machine.elsewhere is None and (machine.wanted == name or (machine.wanted == "auto" and is_present(machine))):
            yield name, checks
        else:
            asked = machine.elsewhere or f"not checked: device={machine.wanted} was chosen"
            why = sign if machine.wanted == "auto" and not machine.elsewhere else asked
            yield name, [("", partial(_skip, why=why))]
    yield machine.wanted, () if machine.elsewhere else smoke_tests.plugin_checks(machine.wanted)
    yield ANY_DEVICE, ANY
    yield "job", [(name, partial(_part, preflight=preflight)) for name, preflight in machine.parts]
    for device in smoke_tests.devices(machine) if trial and not machine.elsewhere else ():
        yield f"trial on {device}", tuple(smoke_tests.trials_of_device(device, visible_count(machine, device)))


def _skip(machine: SystemInfo, why: str) -> CheckResult:
    return skip(why)


def _part(machine: SystemInfo, preflight: Callable[[], None]) -> CheckResult:
    """What a part of a job finds missing here: its error's first line, and what that says to type."""
    try:
        preflight()
    except RunnerError as error:
        what, _, line = str(error).partition("\n")
        return problem(what, line.strip() or "run doctor")
    return ok("nothing is missing")


def checked_devices(machine: SystemInfo) -> list[str]:
    """The devices to check: the requested one, or all that this machine seems to have."""
    if machine.elsewhere:
        return []
    if machine.wanted != "auto":
        return [machine.wanted]
    signs = {"npu": driver.is_present, "cuda": nvidia.is_present}
    return ["cpu", *(device for device, is_present in signs.items() if is_present(machine))]


def npu_count(machine: SystemInfo) -> int:
    """How many chips there are: device files, or what npu-smi lists."""
    info = driver.info_of(machine)
    return len(machine.nodes) or (len(info.chips) if info else 0)


def visible_count(machine: SystemInfo, device: str) -> int:
    """How many devices of this kind a process sees."""
    if device == "cpu":
        return 1
    if trial_simulator(device):
        return SIMULATED_CARDS
    there = npu_count(machine) if device == "npu" else nvidia.count(machine)
    text = machine.environment.get(VARIABLES[device])
    return there if text is None else min(there, len([entry for entry in text.split(",") if entry.strip()]))


def _run_check(look: Callable[[SystemInfo], CheckResult], machine: SystemInfo, debug: bool) -> CheckResult:
    try:
        return look(machine)
    except Exception as error:
        if debug:
            traceback.print_exc(file=sys.stderr)
        last = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"
        return CheckResult(CheckStatus.BUG, f"this check failed, which is a bug in this project: {what}")
