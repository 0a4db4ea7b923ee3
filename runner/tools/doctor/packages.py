"""Checks of installed packages against one another, from their metadata alone; nothing is imported."""

from __future__ import annotations

import re
from collections.abc import Sequence

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import Version

from runner.device.ascend import generation
from runner.device.device_kinds import CUDA
from runner.tools.doctor import ascend
from runner.tools.doctor.cann import find_cann
from runner.tools.doctor.check_result import CheckResult, ok, problem, skip, unknown, warning
from runner.tools.doctor.host import PROJECT
from runner.tools.doctor.system_info import SystemInfo
from runner.tools.doctor.versions import (
    AS_OF,
    CANN,
    OLDEST_TORCH,
    SETS,
    VersionSet,
    cann_for,
    release,
    same_version,
    set_of_vllm_ascend,
    torch_for,
    torch_npu_for,
)
from runner.tracker.text import count_noun

STACK = (PROJECT, "torch-npu", "vllm", "vllm-ascend", "triton-ascend", "transformers", "peft", "hydra-core")
CPU_BUILDS = "https://download.pytorch.org/whl/cpu"  # torch's own index of them
_BUILD = re.compile(r"""^__(?:soc_version|device_type)__\s*=\s*["']?(?:AscendDeviceType\.)?([\w-]+)""", re.MULTILINE)


def torch_pair(machine: SystemInfo) -> CheckResult:
    """torch and torch_npu must be the same release."""
    torch, npu = machine.version("torch"), machine.version("torch-npu")
    if torch is None:
        return problem("torch is not installed", "pip install -e . -c constraints/cpu.txt")
    if npu is None:
        return problem(f"torch {torch} without torch_npu", f"pip install {_torch_pair_to_install(machine, torch)}")
    seen = f"torch {torch}, torch_npu {npu}"
    if release(torch) != release(npu):
        return problem(
            f"{seen}: they must be the same release", f"pip install {_torch_pair_to_install(machine, torch)}"
        )
    built = re.search(r"^cuda.*=\s*'([\d.]+)'", machine.read_package_file("torch/version.py") or "", re.MULTILINE)
    if built and machine.glob(str(CUDA.nodes)):
        return problem(
            f"{seen}; torch is a build for CUDA {built[1]}, and beside an NVIDIA GPU torch_npu refuses to load",
            f"pip install torch=={release(torch)}+cpu, or export CUDA_VISIBLE_DEVICES=",
        )
    return ok(seen)


def _torch_pair_to_install(machine: SystemInfo, torch: str) -> str:
    """The torch and torch_npu to install: those of the installed CANN.

    Without CANN and torch_npu, those of the CANN that `cann.toolkit` names; else torch_npu for the installed torch.
    """
    if machine.sampler == "vllm":
        return _pip_arguments(machine, _engine_set(machine).torch_npu)
    found = find_cann(machine)
    proposed = None if machine.version("torch-npu") else next(iter(CANN))
    usable = _usable_torch_npu((found.version if found else proposed) or "")
    best = next((one for one in usable if release(one) == release(torch)), next(iter(usable), None))
    return _pip_arguments(machine, best) if best else f"torch_npu=={release(torch)}"


def _pip_arguments(machine: SystemInfo, npu: str) -> str:
    """What to hand to pip for this torch_npu and its torch."""
    torch = torch_for(npu, machine.arch)
    where = f" --extra-index-url {CPU_BUILDS}" if "+" in torch else ""
    return f"torch=={torch} torch_npu=={npu}{where}"


def _usable_torch_npu(cann: str) -> list[str]:
    """The torch_npu versions for this CANN whose torch this project takes."""
    return [npu for npu in torch_npu_for(cann) if Version(npu) >= OLDEST_TORCH]


def torch_npu_and_cann(machine: SystemInfo) -> CheckResult:
    """torch_npu's post number must be the one that was built for the installed CANN."""
    npu, found = machine.version("torch-npu"), find_cann(machine)
    if npu is None or found is None or found.version is None:
        return skip("one of the two is missing or does not say its version")
    seen = f"torch_npu {npu}, CANN {found.version}"
    fits, built = cann_for(npu), torch_npu_for(found.version)
    if any(same_version(found.version, one) for one in fits):
        return ok(seen)
    if not fits:
        others = f"; for CANN {found.version} it has {', '.join(built)}" if built else ""
        return unknown(f"{seen}: the table of {AS_OF} does not have this torch_npu{others}")
    if not built and any(found.version.split(".")[:2] == one.split(".")[:2] for one in fits):
        return unknown(f"{seen}: built for CANN {' or '.join(fits)}; this patch release is not in the table of {AS_OF}")
    return problem(
        f"{seen}: it is built for CANN {' or '.join(fits)}", _remedy_for_cann(machine, found.version, npu, fits)
    )


def _remedy_for_cann(machine: SystemInfo, cann: str, npu: str, fits: Sequence[str]) -> str:
    """The torch_npu to install beside this CANN, or the CANN where it has none that this project can use."""
    usable = _usable_torch_npu(cann)
    if not usable:
        return f"install CANN {fits[0]}: for {cann} there is no torch_npu of torch {OLDEST_TORCH} or newer"
    best = next((one for one in usable if release(one) == release(npu)), usable[0])
    return f"pip install {_pip_arguments(machine, best)}"


def vllm_pair(machine: SystemInfo) -> CheckResult:
    """vllm-ascend serves exactly the vLLM of its own number, with the torch and CANN of its row."""
    vllm, plugin = machine.version("vllm"), machine.version("vllm-ascend")
    if plugin is None:
        if machine.sampler == "vllm":
            return problem(
                "vllm-ascend is not installed, and sampler=vllm needs it (sampler=torch does not)",
                install_engine(machine),
            )
        return skip("vllm-ascend is not installed")
    wanted = release(plugin)
    if vllm is None:
        return problem(f"vllm-ascend {plugin} without vllm", _install_vllm(wanted))
    seen = f"vllm {vllm}, vllm-ascend {plugin}"
    if release(vllm) != wanted:
        return problem(f"{seen}: vllm-ascend needs vllm {wanted}", _install_vllm(wanted))
    row = set_of_vllm_ascend(plugin)
    if row is None:
        return unknown(f"{seen}: not in the table of {AS_OF}")
    torch, npu, found = machine.version("torch"), machine.version("torch-npu"), find_cann(machine)
    wrong = [f"torch {row.torch}, not {torch}"] if torch and release(torch) != row.torch else []
    wrong += [f"torch_npu {row.torch_npu}, not {npu}"] if npu and not same_version(npu, row.torch_npu) else []
    if found and found.version and row.cann and not same_version(found.version, row.cann):
        wrong += [f"CANN {row.cann}, not {found.version}"]
    if wrong:
        return warning(f"{seen} was released with {', '.join(wrong)}", "docs/npu-versions.md has the sets")
    return ok(seen)


def _engine_set(machine: SystemInfo) -> VersionSet:
    """The versions of an engine: of the installed vllm-ascend or CANN, else the newest supported ones."""
    plugin, found = machine.version("vllm-ascend"), find_cann(machine)
    if plugin is not None and (its := set_of_vllm_ascend(plugin)) is not None and its.usable:
        return its
    usable = [one for one in SETS if one.usable and one.vllm_ascend]
    fitting = [one for one in usable if found and found.version and one.cann and same_version(found.version, one.cann)]
    return next(iter([*fitting, *usable]))


def install_engine(machine: SystemInfo) -> str:
    """What to type to install an engine of that set."""
    one = _engine_set(machine)
    return f"{_install_vllm(one.vllm)} && pip install vllm-ascend=={one.vllm_ascend} -c constraints/npu-{one.name}.txt"


def _install_vllm(version: str | None) -> str:
    """vLLM itself, without what it has for CUDA: vllm-ascend brings the rest."""
    return f"VLLM_TARGET_DEVICE=empty pip install --no-binary vllm vllm=={version}"


def wheel_and_soc(machine: SystemInfo) -> CheckResult:
    """vllm-ascend's kernels are built for one generation; on another they are undefined behaviour."""
    plugin, chip = machine.version("vllm-ascend"), ascend.soc_of_first_card(machine)
    if plugin is None or chip is None:
        return skip("vllm-ascend is not installed" if plugin is None else "npu-smi does not name the chip")
    said = _BUILD.findall(machine.read_package_file("vllm_ascend/_build_info.py") or "")
    built = {generation(one) for one in said} - {"unknown"}
    if not built:
        return unknown(f"vllm-ascend {plugin} does not say what it was built for; this is a {chip}")
    if generation(chip) not in built:
        return problem(
            f"vllm-ascend {plugin} was built for {', '.join(said)}, and this is a {chip} ({generation(chip)})",
            f"SOC_VERSION={chip.lower()} pip install --no-binary vllm-ascend vllm-ascend=={plugin}",
        )
    return ok(f"vllm-ascend {plugin} was built for {', '.join(said)}, and this is a {chip}")


def pins(machine: SystemInfo) -> CheckResult:
    """What the packages of the stack demand of one another."""
    broken = unmet(machine, STACK)
    if not broken:
        return ok(f"{count_noun(sum(name in machine.packages for name in STACK), 'package')}: all they demand is there")
    answer = problem if any(name == PROJECT for name, *_ in broken) else warning
    demands = " ".join(f"'{line.partition(';')[0].strip()}'" for *_, line in broken)
    return answer("; ".join(text for _, text, _ in broken), f"pip install {demands}")


def unmet(machine: SystemInfo, names: Sequence[str]) -> list[tuple[str, str, str]]:
    """What those of these packages that are there demand and do not have: package, what is wrong, demand."""
    broken = []
    for name in names:
        package = machine.packages.get(name)
        for line in package.requires if package else ():
            try:
                demand = Requirement(line)
            except InvalidRequirement as error:
                broken.append((name, f"{name}'s metadata cannot be read: {error}".splitlines()[0], name))
                continue
            if demand.marker is not None and not demand.marker.evaluate({"extra": ""}):
                continue
            version = machine.version(demand.name)
            if version is None:
                broken.append((name, f"{name} needs {demand.name}, which is missing", line))
            elif not demand.specifier.contains(version, prereleases=True):
                text = f"{name} {machine.version(name)} needs {demand.name}{demand.specifier}, not {version}"
                broken.append((name, text, line))
    return broken


def antlr(machine: SystemInfo) -> CheckResult:
    """Hydra's grammar is compiled for antlr 4.9; a newer runtime breaks its import."""
    version = machine.version("antlr4-python3-runtime")
    if version is None:
        return problem("antlr4-python3-runtime is missing: Hydra cannot be imported", _ANTLR)
    if version.split(".")[:2] != ["4", "9"]:
        return problem(f"antlr4-python3-runtime {version}: Hydra needs 4.9 and fails on import", _ANTLR)
    return ok(f"antlr4-python3-runtime {version}, which Hydra needs")


_ANTLR = "pip install antlr4-python3-runtime==4.9.3 (and math-verify without an antlr extra)"
